"""The check "memory" of scripts/doctor.py --full: what ranks hold against what is planned."""

from contextlib import suppress

from doctor_findings import OK, WARNING, Finding, Found, gb, possible
from doctor_lab import Lab
from doctor_memory_watch import MemoryWatch
from doctor_time import while_time

from backend.client.model_choice import ModelChoice
from backend.config import ParallelConfig
from backend.protocol import Describe, RefusedError

#: Family of the tiny model that runs first.
TINY = "flux-dev"


def memory(lab: Lab) -> Found:
    """The most that ranks hold while the mid-size Flux runs, against what is planned."""
    configs = {"ulysses": ParallelConfig(ulysses_degree=lab.ranks)}
    configs["pipefusion"] = ParallelConfig(pipefusion_degree=lab.ranks)
    configs["tensor parallel"] = ParallelConfig(tensor_parallel_degree=lab.ranks)
    configs["FSDP"] = ParallelConfig(ulysses_degree=lab.ranks, shard_weights=True)
    configs = {"one rank": ParallelConfig()} if lab.ranks == 1 else configs
    lab.flux()
    for name in while_time(lab, configs):
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
