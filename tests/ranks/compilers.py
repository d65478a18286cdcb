"""The shallow Flux under Ulysses with compiled blocks: a compiler that fails on the last rank alone, and what
Inductor generates on every rank.

main(FOLDER, BACKEND, OUT.json); of "eager" the last rank's fails.
"""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from tiny import golden_request, relative, write_shallow_flux

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import compiled_blocks, mesh
from backend.sampling.step_loop import Callbacks

torch.compile(torch.nn.Identity(), backend="eager")(torch.zeros(1))  # imported before ranks are forked

#: What the failing compiler says.
FULL = "No space left on device"
STEPS = 2


def fails(graph, inputs):
    """Stand in for a backend of torch.compile where a disk is full."""
    raise OSError(FULL)


def main(folder: str, backend: str, out: str):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = ParallelConfig(device="cpu", ulysses_degree=ranks)
    engine = Engine(config, mesh.build(config, "cpu"))
    engine.load("tiny", str(write_shallow_flux(Path(folder, f"{rank}.safetensors"))), "default")
    sample, _ = golden_request("euler_simple")
    sample = replace(sample, tensors={**sample.tensors, "sigmas": sample.tensors["sigmas"][: STEPS + 1]})
    plain, _ = engine.sample(sample, Callbacks())
    compiled_blocks.BACKEND = backend
    lookup = torch._dynamo.lookup_backend
    is_failing = backend == "eager" and rank == ranks - 1
    with mock.patch.object(
        torch._dynamo, "lookup_backend", lambda name: fails if is_failing else lookup(name)
    ):
        compiled, stats = engine.sample(replace(sample, compile="blocks"), Callbacks())
    compiler = compiled_blocks.COMPILER
    everyone: list = [None] * ranks
    dist.all_gather_object(everyone, [compiler.graphs, len(compiler.failed)])
    if rank == 0:
        found = {
            "relative": relative(compiled, plain),
            "notes": stats["notes"],
            "graphs and failed": everyone,
        }
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
