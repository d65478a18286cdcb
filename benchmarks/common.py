"""What the benchmarks share: a Flux-like model with random weights, ranks, clocks, rounds and statistics.
Reports are in report.py.

Method: one thread a rank on the CPU, float32 there, and a core of its own where ways to sample are compared;
all scenarios of a benchmark run in one call, interleaved in rounds and in another order each round; before a
round we wait until other processes are quiet; speed-ups are taken within a round, then their median and range
over rounds are printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

if (
    "torch" not in sys.modules
):  # else it has its threads, and the environment is another program's (the doctor)
    os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import psutil
import report
import torch
import torch.distributed as dist

from backend.client.launching.rank_environment import sanitized_environment
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel.mesh import Mesh, build, single
from backend.protocol import Sample
from backend.sampling.step_loop import Callbacks

#: Flux's shape at 177M parameters: 14 blocks of equal work at 1024 image and 128 text tokens.
FLUX = dict(
    in_channels=64,
    num_layers=4,
    num_single_layers=10,
    attention_head_dim=64,
    num_attention_heads=12,
    joint_attention_dim=768,
    pooled_projection_dim=768,
    guidance_embeds=False,
    axes_dims_rope=(8, 28, 28),
)
#: Where spawned ranks find the checkpoint.
MODEL_VARIABLE = "PARALLEL_DIT_BENCHMARK_MODEL"
#: Other processes are quiet where they use at most this part of all cores (percent).
QUIET_PERCENT = 5.0


def parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument(
        "--quick", action="store_true", help="one round of few steps: shows that it runs, measures little"
    )
    result.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    result.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="longest wait in seconds for other processes to be quiet, before each round",
    )
    result.add_argument(
        "--out", default=str(report.OUT), help="folder for the numbers and the chart (output/benchmarks)"
    )
    result.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda wants one GPU for each rank"
    )
    return result


def model_options(result: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Options of the benchmarks that sample."""
    result.add_argument(
        "--model", help="a diffusers folder of a Flux transformer (default: 177M random parameters)"
    )
    result.add_argument(
        "--side", type=int, default=64, help="side of the square latent (64: 1024 image tokens)"
    )
    result.add_argument("--text", type=int, default=128, help="text tokens")
    return result


def parse(options: argparse.ArgumentParser) -> argparse.Namespace:
    chosen = options.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.patience = 1, min(chosen.patience, 5.0)
    return chosen


# ---------------------------------------------------------------------- model and request
def save_model(folder: str | Path, device: str = "cpu", **config):
    """Write a FluxTransformer2DModel with random weights (seed 0) as a diffusers folder: float32 for the CPU,
    bf16 for CUDA."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)  # no copy twice as large
    try:
        FluxTransformer2DModel(**{**FLUX, **config}).save_pretrained(folder)
    finally:
        torch.set_default_dtype(usual)


def request(
    model: str, steps: int, guided: bool = False, side: int = 64, text: int = 128, **settings
) -> Sample:
    """A text-to-image request of ``steps`` Euler steps for the model at ``model``; ``guided`` evaluates a
    negative prompt too."""
    config = json.loads(Path(model, "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, config["in_channels"] // 4, side, side, generator=generator)
    tensors = {"noise": noise, "latent": torch.zeros_like(noise), "sigmas": torch.linspace(1, 0, steps + 1)}
    for branch in ("positive", "negative")[: 2 if guided else 1]:
        tensors[f"{branch}.c_crossattn"] = torch.randn(
            1, text, config["joint_attention_dim"], generator=generator
        )
        tensors[f"{branch}.y"] = torch.randn(1, config["pooled_projection_dim"], generator=generator)
        if config["guidance_embeds"]:
            tensors[f"{branch}.guidance"] = torch.full((1,), 3.5)
    return Sample(
        model="model", sampler="euler", cfg=4.0 if guided else 1.0, seed=0, tensors=tensors, **settings
    )


# ---------------------------------------------------------------------- ranks
def spawned() -> bool:
    """Is this process a rank?"""
    return "RANK" in os.environ


def rank_environment(ranks: int, device: str, model: str) -> dict[str, str]:
    """The environment of ``ranks`` ranks, as the backend's have it: NCCL's way between GPUs, the allocator,
    hardware queues, malloc."""
    started = sanitized_environment(dict(os.environ), ParallelConfig(data_parallel_degree=ranks), device)
    return {**started, "OMP_NUM_THREADS": "1", MODEL_VARIABLE: model}


def spawn(script: str, ranks: int, device: str, model: str | None = None, **config):
    """Run this command once more as ``ranks`` ranks of one group, and end with their exit status. ``config``:
    of the model with random weights."""
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
        if not model:
            save_model(folder, device, **config)
        env = rank_environment(ranks, device, model or folder)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
            "--nproc-per-node",
            str(ranks),
            "--log-dir",
            f"{folder}/ranks",
        ]
        sys.exit(subprocess.run([*command, script, *sys.argv[1:]], env=env).returncode)


def hold_to_one_core(device: str):
    """Keep this rank, and what it starts, to a core of its own, as it would keep to a GPU: else ranks take
    turns on all cores. Nothing on CUDA, on other systems than Linux, and with fewer cores than ranks."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if device == "cpu" and len(cores) >= int(os.environ["WORLD_SIZE"]):
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"])]})


def engine(config: ParallelConfig, device: str, model: str, mesh: Mesh | None = None) -> Engine:
    """An engine with the model loaded, on a mesh of all ranks unless ``mesh`` is given."""
    result = Engine(config, mesh or build(config, device))
    result.load("model", model, "default")
    return result


def alone(device: str, model: str) -> Engine:
    """An engine of this process, without the other ranks."""
    return engine(ParallelConfig(), device, model, single(device))


def meet():
    """Wait for all ranks, asleep."""
    if dist.is_initialized():
        dist.barrier()


def leave() -> NoReturn:
    """End this process, once all ranks are here: destructors of process groups wait for peers that may be
    gone, or abort (backend/worker.py ends alike)."""
    meet()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def of_all_ranks(*values: float) -> list[list[float]]:
    """``values`` of every rank."""
    rows = [torch.zeros(len(values), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor(values, dtype=torch.float64))
    return [row.tolist() for row in rows]


# ---------------------------------------------------------------------- clocks
class Marks:
    """Points in time: of the clock on the CPU, of the device's stream on CUDA (no synchronisation between
    them)."""

    def __init__(self, device: str):
        self.cuda, self.marks = device == "cuda", []

    def __call__(self, *_):
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Seconds of each mark since the first."""
        if self.cuda:
            torch.cuda.synchronize()
            return [self.marks[0].elapsed_time(mark) / 1000 for mark in self.marks]
        return [mark - self.marks[0] for mark in self.marks]


def clocked(engine: Engine, sample: Sample, device: str) -> list[float]:
    """Run a request: seconds at its start (0), after each step, and at its end."""
    marks = Marks(device)
    marks()
    engine.sample(sample, Callbacks(on_step=marks))
    marks()
    return marks.seconds


def timed(action: Callable, device: str) -> tuple[float, float]:
    """Seconds and this process's CPU seconds of ``action()``."""
    marks, cpu = Marks(device), time.process_time()
    marks()
    action()
    marks()
    return marks.seconds[-1], time.process_time() - cpu


# ---------------------------------------------------------------------- rounds
def busy_percent() -> float:
    """How much of all cores other processes use, while ours sleep."""
    return psutil.cpu_percent(interval=1.0)


def wait_until_quiet(patience: float) -> float:
    """Wait for other processes, at most ``patience`` seconds; what they still use (percent of all cores),
    with a warning if that is much."""
    deadline = time.monotonic() + patience
    while (busy := busy_percent()) > QUIET_PERCENT and time.monotonic() < deadline:
        pass
    if busy > QUIET_PERCENT:
        print(
            f"warning: other processes use {busy:.0f}% of the cores; this round's numbers are noisy",
            file=sys.stderr,
            flush=True,
        )
    return busy


def interleave(
    scenarios: dict[str, Callable], rounds: int, patience: float
) -> tuple[dict[str, list], list[float]]:
    """Results of each scenario by round, and how busy other processes were (percent) before each. Every rank
    calls this with the same scenarios."""
    results, busy, names = {name: [] for name in scenarios}, [], list(scenarios)
    leader = not dist.is_initialized() or dist.get_rank() == 0
    for round in range(rounds):
        if leader:
            busy.append(wait_until_quiet(patience))
        for name in names[round % len(names) :] + names[: round % len(names)]:
            meet()
            results[name].append(scenarios[name]())
            if leader:
                print(
                    f"round {round + 1}/{rounds}: {name} {json.dumps(results[name][-1])}",
                    file=sys.stderr,
                    flush=True,
                )
    return results, busy


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(over: list[float], under: list[float]) -> dict[str, float]:
    """Spread of over/under, round by round."""
    return spread([a / b for a, b in zip(over, under)])
