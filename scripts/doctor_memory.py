"""The check "memory" of scripts/doctor.py --full: what ranks hold against what is planned."""

import threading
import time
from contextlib import suppress

import psutil
from doctor_findings import OK, WARNING, Finding, Found, gb, possible
from doctor_gpu_memory import GpuMemory
from doctor_lab import Lab
from doctor_time import of_form, while_time

from backend.client.auto.model_choice import ModelChoice
from backend.config import ParallelConfig
from backend.protocol import Describe, RefusedError

#: Family of the tiny model that runs first.
TINY = "flux-dev"
POLL_SECONDS = 0.02


class MemoryWatch(threading.Thread):
    """Samples the memory of every rank: of its GPU, all of it, or of its process on the CPU."""

    def __init__(self, lab: Lab, config: ParallelConfig):
        super().__init__(daemon=True)
        self.pids = lab.backend(config).welcome.pids
        self.memory = GpuMemory(lab.gpus[: len(self.pids)]) if lab.device == "cuda" else None
        self.done = threading.Event()
        self.before = self.most = self.held()
        self.start()

    def held(self) -> list[int]:
        """Return the bytes that each rank holds now."""
        if self.memory is None:
            return [psutil.Process(pid).memory_info().rss for pid in self.pids]
        return self.memory.taken()

    def run(self):
        with suppress(psutil.NoSuchProcess):  # ranks that are ended meanwhile, of which the request says why
            while not self.done.is_set():
                self.most = [max(pair) for pair in zip(self.most, self.held())]
                time.sleep(POLL_SECONDS)

    def stop(self) -> list[int]:
        """End; return the most above what was held at the start."""
        self.done.set()
        self.join()
        return [most - before for most, before in zip(self.most, self.before)]


def memory(lab: Lab) -> Found:
    """The most that ranks hold while the mid-size Flux runs, against what is planned."""
    configs = {"ulysses": ParallelConfig(ulysses_degree=lab.ranks)}
    configs["pipefusion"] = ParallelConfig(pipefusion_degree=lab.ranks)
    configs["tensor parallel"] = ParallelConfig(tensor_parallel_degree=lab.ranks)
    configs["FSDP"] = ParallelConfig(ulysses_degree=lab.ranks, shard_weights=True)
    configs = {"one rank": ParallelConfig()} if lab.ranks == 1 else configs
    lab.flux()
    for name in while_time(lab, of_form(lab, configs, ("one rank", "pipefusion", "FSDP"))):
        yield from possible("memory", name, _memory, lab, name, configs[name])


def _memory(lab: Lab, name: str, config: ParallelConfig) -> Finding:
    path = lab.flux()
    tiny, sample, _ = lab.tiny(TINY)
    lab.fresh()  # the allocator of ranks that ran something larger holds more
    with suppress(RefusedError):  # too many ranks for so small a model: what they need is counted, too
        lab.run(config, tiny, sample)  # kernels, communicators
    watch = MemoryWatch(lab, config)
    sample = lab.request(path, 2)
    try:
        lab.run(config, path, sample)
    finally:
        most = watch.stop()
    backend = lab.backend(config)
    shape = list(sample.tensors["noise"].shape[1:])
    model = backend.models[ModelChoice(str(path))]
    described = backend.describe(
        Describe(
            model=model,
            latent=shape,
            text_tokens=lab.size.text,
            prompts=1,
            num_pipeline_patch=config.num_pipeline_patch,
        )
    )
    planned = [rank["device_bytes"] for rank in described.ranks]
    over = max(held - plan for held, plan in zip(most, planned))
    each = ", ".join(f"rank {i} {gb(m)} (planned {gb(p)})" for i, (m, p) in enumerate(zip(most, planned)))
    status = OK if over <= lab.size.slack else WARNING
    text = f"{name}: the most on top of an idle rank's memory: {each}"
    return Finding("memory", status, text, {"method": name, "held": most, "planned": planned})
