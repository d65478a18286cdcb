"""Rank program: many configurations of one world size, each against the single process; rank 0 writes the errors as JSON.

torchrun ... tests/ranks/matrix.py CHECKPOINT OUT.json
"""

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import torch
import torch.distributed as dist

from backend import mesh
from backend.config import NOT_YET, ParallelConfig
from backend.denoise import Callbacks
from backend.engine import Engine
from tiny import FLUX_CASES, error_in_std, golden_request, relative, to_vae_units

AXES = ("cfg_degree", "pipefusion_degree", "ulysses_degree", "ring_degree", "data_parallel_degree", "tensor_parallel_degree")
STEPS = 6


def configurations(world: int) -> list[ParallelConfig]:
    """Every combination of degrees that fills ``world`` ranks and that this version runs."""
    sizes = [[1] if axis in NOT_YET else [d for d in range(1, world + 1) if world % d == 0 and (axis != "cfg_degree" or d <= 2)] for axis in AXES]
    products = [dict(zip(AXES, degrees)) for degrees in itertools.product(*sizes)]
    return [config for config in (ParallelConfig(**p) for p in products) if config.world_size == world]


def variants(config: ParallelConfig) -> list[tuple[str, ParallelConfig]]:
    """The ways to run a configuration: exactly, and with stale keys and values where it has a pipeline."""
    if config.pipefusion_degree == 1:
        return [("exact", config)]
    return [("one patch", replace(config, num_pipeline_patch=1)),
            ("all warm-up", replace(config, warmup_steps=STEPS)),
            ("stale", config),
            ("stale, uneven patches", replace(config, num_pipeline_patch=config.pipefusion_degree + 1))]


def cases(world: int) -> list[str]:
    """Golden cases to run: all on two ranks; a few that differ in kind on more, which share the same code."""
    chosen = ["size20x12", "euler_ancestral_simple", "heun_simple"]
    return chosen + [case for case in FLUX_CASES if case not in chosen] if world == 2 else chosen


def single_process(checkpoint: str, names: list[str]) -> dict[str, torch.Tensor]:
    """What one rank computes: the reference of all others."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", checkpoint, "default")
    return {case: run(engine, engine.config, case)[0][0] for case in names}


def run(engine: Engine, config: ParallelConfig, case: str):
    sample, golden = golden_request(case)
    sample = replace(sample, num_pipeline_patch=config.num_pipeline_patch, warmup_steps=config.warmup_steps)
    engine.check_sample(sample)
    return engine.sample(sample, Callbacks()), golden


def main(checkpoint: str, out: str):
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    references = single_process(checkpoint, cases(world)) if rank == 0 else None
    rows = []
    for config in configurations(world):
        engine = Engine(config, mesh.build(config, "cpu"))
        engine.load("tiny", checkpoint, "default")
        for name, variant in variants(config):
            for case in cases(world) if name == "exact" else cases(world)[:2]:
                if config.cfg_degree == 2 and "negative.y" not in golden_request(case)[0].tensors:
                    continue
                (samples, stats), golden = run(engine, variant, case)
                if rank == 0:
                    rows.append({
                        "config": config.product, "variant": name, "case": case, "relative": relative(samples, references[case]),
                        "golden": error_in_std(to_vae_units(samples), golden), "bytes_sent": stats["bytes_sent"], "bytes_read": engine.models["tiny"].bytes_read})
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
