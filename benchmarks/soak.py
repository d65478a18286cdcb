"""What grows while one backend answers many requests: memory, shared memory, descriptors and threads of each
rank and of the client.

    python benchmarks/soak.py [--requests 2000] [--way pipefusion|ulysses|cfg] [--quick]

One backend of two ranks on the CPU, launched as ComfyUI's nodes launch it, with a small Flux of random
weights. Requests take turns: samples of three sizes, with and without a negative prompt and previews, calls
of the model with cached prompts, a sample that is cancelled, one that is refused, another client that comes
and goes, a LoRA of another strength; once in 100, a second model is loaded and freed, and the ranks change to
other degrees and back. After every 100 of them /proc is read. Slopes are least squares over what was read
after the first 300. Fails where memory grows by more than the goal. Linux only.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import common
import torch
from safetensors.torch import save_file

from backend import protocol
from backend.client import pool
from backend.client.auto.model_choice import ModelChoice
from backend.client.client import BackendClient
from backend.client.pool import Backend
from backend.config import ParallelConfig

#: Most megabytes of memory that 100 requests may leave on a rank.
GOAL = 0.5
#: Requests until caches and allocators are full.
WARM = 300
EVERY = 100
TINY: dict = dict(num_layers=2, num_single_layers=4, num_attention_heads=4)
#: Measured -> how it is written, per 100 requests.
KINDS = {"memory": "MB", "shared": "MB", "descriptors": "", "threads": ""}


class Requests:
    """Requests of every kind for one model, in turn."""

    def __init__(self, backend: Backend, folder: str):
        self.backend = backend
        self.folder = folder
        self.lora = Path(folder, "loras", "lora.safetensors")
        self.lora.parent.mkdir()
        layer = "transformer.transformer_blocks.0.attn.to_q"
        names = {"lora_A": (8, 256), "lora_B": (256, 8)}
        save_file({f"{layer}.{k}.weight": torch.randn(v) for k, v in names.items()}, self.lora)
        model = backend.load(folder).model
        two = backend.config.cfg_degree == 2  # which a request with one prompt leaves without work
        self.plain = replace(common.request(folder, 4, guided=two, side=16, text=32), model=model)
        self.guided = replace(common.request(folder, 4, guided=True, side=16, text=48), model=model)
        self.large = replace(common.request(folder, 2, guided=two, side=32, text=32), model=model)
        self.long = replace(common.request(folder, 200, guided=two, side=16, text=32), model=model)
        self.kinds: list[Callable[[], object]] = [
            lambda: backend.sample(self.plain),
            lambda: backend.sample(self.guided),
            lambda: backend.sample(self.large),
            lambda: backend.sample(replace(self.guided, preview_seconds=1e-9)),
            self._call,
            self._cancelled,
            self._refused,
            self._visitor,
            self._with_lora,
        ]
        self.calls = 0

    def __call__(self, number: int):
        if number % EVERY == EVERY // 2:
            self._other_model()
        elif number % EVERY == EVERY // 4:
            self._other_degrees()
        else:
            self.kinds[number % len(self.kinds)]()

    def _call(self):
        """A call of the model whose prompt is new to the ranks every other time."""
        self.calls += 1
        tensors = self.plain.tensors
        prompt = {f"cond.{key.partition('.')[2]}": tensors[key] for key in tensors if "positive." in key}
        keys = {name: f"{name} {self.calls // 2}" for name in prompt}
        given = {"x": tensors["noise"], "time": torch.full((1,), 0.5)}
        call = protocol.ModelCall(self.plain.model, client="soak", tensors=given)
        if self.calls % 2 == 0:
            old = [f"{name} {self.calls // 2 - 1}" for name in prompt]
            call = replace(call, cache=keys, forget=old, tensors={**given, **prompt})
        else:
            call = replace(call, cached=keys)
        self.backend.sample(call)

    def _cancelled(self):
        seen = []
        self.backend.sample(self.long, seen.append, lambda: bool(seen))

    def _refused(self):
        try:
            self.backend.sample(replace(self.plain, sampler="no such solver"))
        except protocol.RefusedError:
            return
        raise AssertionError("it should be refused")

    def _with_lora(self):
        self.calls += 1
        loaded = self.backend.load(self.folder, loras=[(str(self.lora), (self.calls % 7) / 7)])
        self.backend.sample(replace(self.plain, model=loaded.model))

    def _other_model(self):
        loaded = self.backend.load(self.folder, "bf16")
        self.backend.sample(replace(self.plain, model=loaded.model))
        self.backend.unload(ModelChoice(self.folder, "bf16"))

    def _other_degrees(self):
        before = self.backend.config
        other = "ulysses_degree" if before.ulysses_degree == 1 else "cfg_degree"
        degree: dict = {other: 2}
        for config in (ParallelConfig(device="cpu", **degree), before):
            self.backend.become(config)
            model = self.backend.load(self.folder).model
            assert model == self.plain.model
            self.backend.sample(self.guided)

    def _visitor(self):
        process = self.backend.process
        assert process is not None
        client = BackendClient(process.address, process._token)
        client.sample(self.plain)
        client.close()


def usage(pid: int | str) -> dict[str, float]:
    """Return what a process holds now: MB of memory of its own and shared, descriptors, threads."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {
        key: value.split()[0] for key, _, value in (line.partition(":") for line in lines) if value.split()
    }
    return {
        "memory": int(status["RssAnon"]) / 1000,
        "shared": int(status["RssShmem"]) / 1000,
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def slope(values: list[float]) -> float:
    """Return the growth from one value to the next by least squares; 0 of fewer than two."""
    if len(values) < 2:
        return 0.0
    return statistics.linear_regression(range(len(values)), values).slope


def soak(options: argparse.Namespace, folder: str) -> dict[str, list[dict[str, float]]]:
    """Return what each process held, after every 100 requests."""
    common.save_model(folder, **TINY)
    pool.allow(folder)
    degree: dict = {f"{options.way}_degree": 2}
    backend = pool.backend_for(ParallelConfig(device="cpu", **degree))
    requests = Requests(backend, folder)
    processes = {f"rank {i}": pid for i, pid in enumerate(backend.welcome.pids)} | {"client": "self"}
    usages: dict[str, list[dict[str, float]]] = {name: [] for name in processes}
    began = time.monotonic()
    for number in range(1, options.requests + 1):
        requests(number)
        if number % options.every == 0:
            for name, pid in processes.items():
                usages[name].append(usage(pid))
            now = ", ".join(f"{name} {values[-1]['memory']:.1f} MB" for name, values in usages.items())
            print(f"{number} requests, {time.monotonic() - began:.0f} s: {now}", file=sys.stderr, flush=True)
    assert process_beats(backend), "no rank beats"
    return usages


def process_beats(backend: Backend) -> bool:
    """Print the longest time between two heartbeats of each rank; return whether there are any."""
    beats = backend.process.heartbeats.read() if backend.process is not None else []
    for beat in beats:
        print(f"rank {beat.rank}: {beat.count} heartbeats, at most {beat.longest:.2f} s apart")
    return bool(beats)


def main():
    """Soak a backend and print the slopes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--way", choices=("pipefusion", "ulysses", "cfg"), default="pipefusion")
    parser.add_argument(
        "--quick", action="store_true", help="40 requests: shows that it runs, measures nothing"
    )
    options = parser.parse_args()
    options.every, warm = EVERY, WARM // EVERY
    if options.quick:
        options.requests, options.every, warm = 40, 8, 1
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
        try:
            usages = soak(options, folder)
        finally:
            pool.close_all()
    grown = {}
    print(f"\n{options.way}, per {options.every} requests, after the first {warm * options.every}:")
    for name, values in usages.items():
        slopes = {kind: slope([value[kind] for value in values[warm:]]) for kind in KINDS}
        grown[name] = slopes["memory"]
        print(f"{name:8}" + "".join(f"{kind} {slopes[kind]:+.3f} {unit}   " for kind, unit in KINDS.items()))
    if not options.quick and max(grown.values()) > GOAL:
        sys.exit(f"memory grows by more than {GOAL} MB")


if __name__ == "__main__":
    main()
