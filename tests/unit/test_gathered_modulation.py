"""How often replicas gather weights of modulation, which they compute ahead: recorded messages, and plans."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import wires
from families import GOLDEN, golden
from gathered_weights import gather_weights
from published import RTX4090
from tiny import shallow_flux, write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.checkpoint import Checkpoint
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.parallel.modulation import modulation_cache, modulation_chunks
from backend.planner.cost import Cost
from backend.planner.machine import RequestEstimate
from backend.rank_plan import RequestSize, describe
from backend.rank_plan.modulation import gathers_ahead
from backend.rank_plan.shape_of import shape_of
from backend.rank_plan.workload import Workload
from backend.sampling.model_runner import running
from backend.sampling.request import build
from backend.sampling.step_loop import Callbacks, Denoiser

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import launches
from meta_device import META, meta_device
from operation_count import Count

BATCH, PROMPTS, STEPS = 4, 2, 3
REPLICAS = ParallelConfig(data_parallel_degree=2, shard_weights=True)
PLANNED = RequestEstimate(60, 12, STEPS, PROMPTS, BATCH)


def checkpoint_of(family: str) -> Checkpoint:
    """The family's tiny one, of Flux one of fewer blocks."""
    if family == "flux-dev":
        return launches.with_shapes(family, shallow_flux())
    return launches.checkpoint_of(family)


def gathered(family: str) -> int:
    """Bytes of weights that the second rank gathers in a request of BATCH samples."""
    checkpoint = replace(checkpoint_of(family))  # whose transformer is its own
    mesh = launches.mesh_of(REPLICAS, 1)
    with torch.inference_mode():  # in which its transformer is built
        gather_weights(checkpoint, str(mesh.weights), REPLICAS.sharding_degree, checkpoint.modulation)
    log = wires.Log(1)
    with meta_device(Count()), torch.inference_mode(), wires.recorded(log, operations=False):
        model = launches.load(checkpoint, REPLICAS, mesh, checkpoint.stages(REPLICAS))
        sample = launches.request_of(family, steps=STEPS)
        latents = {name: sample.tensors[name] for name in ("noise", "latent")}
        every = {name: value.expand(BATCH, *value.shape[1:]) for name, value in latents.items()}
        sample = replace(sample, tensors=sample.tensors | every)
        request = build(sample, REPLICAS, model.checkpoint, model.dtype, META, mesh.dp.rank)
        with running(model, request) as runner:
            Denoiser(mesh, request, runner, Callbacks()).run()
    of_weights = [op for op in log.operations if op.group.startswith("weights")]
    return sum(value.nbytes for op in of_weights for value in op.received)


@pytest.mark.parametrize(
    "family, embeddings", [("flux-dev", PROMPTS * BATCH // 2), ("minimax-h3", PROMPTS * 2)]
)
def test_replicas_gather_modulation_as_often_as_planned(family, embeddings, monkeypatch):
    """For as many evaluations as fit, were all embeddings different: those of each prompt and sample of a
    replica, or of each prompt and nested latent. In plans a step has its part of several gathers."""
    checkpoint = checkpoint_of(family)
    shape = shape_of(checkpoint, torch.bfloat16)
    width = sum(block.modulation_width for block in shape.blocks)
    modulation = sum(block.modulation for block in shape.blocks)
    cost = Cost(shape, REPLICAS, RTX4090, PLANNED)

    def counts(at_once: int) -> tuple[int, int, float]:
        monkeypatch.setattr(modulation_chunks, "AHEAD", at_once * embeddings * width * 2)
        size = RequestSize(60, 12, BATCH, PROMPTS, STEPS)
        plan = describe(REPLICAS, checkpoint, size, torch.bfloat16)[0]
        return gathered(family), STEPS * plan.bytes_per_step["weights"], cost.total

    once = counts(STEPS)
    for at_once in (2, 1):
        found = counts(at_once)
        times = 1 + (found[0] - once[0]) / modulation
        assert times == pytest.approx(math.ceil(STEPS / at_once), rel=0.01)
        assert found[1] - once[1] == pytest.approx(times * modulation / 2, rel=0.01)
        seconds = (times - 1) * cost._gathered(modulation, len(shape.blocks))
        assert found[2] - once[2] == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("family, alike", [("flux-dev", False), ("qwen-image", True)])
def test_modulation_is_computed_as_often_as_planned_at_most(family, alike, monkeypatch, tmp_path):
    """On one rank, as in a ring: as often as planned where an embedding has its pooled prompt in it, and less
    where it has the timestep alone, and both prompts share it."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / "model.safetensors", family)), "default")
    model = engine.models["tiny"]
    sample, _ = golden(min(GOLDEN.glob(f"{family}__*.safetensors")).stem)
    evaluations = len(sample.tensors["sigmas"]) - 1
    layers = len(model.cache.modulations)
    checkpoint = open_checkpoint(str(tmp_path / "model.safetensors"))
    size = RequestSize(60, 12, 1, PROMPTS, evaluations)
    work = Workload(ParallelConfig(), checkpoint, size, torch.float32, {}, 0, 0)
    for embeddings in (2, 4, 100):
        monkeypatch.setattr(modulation_chunks, "AHEAD", embeddings * model.cache.width * 4)
        engine.sample(sample, Callbacks())
        made = modulation_cache.COMPUTED["modulation"] / layers
        assert made == math.ceil(evaluations * (1 if alike else PROMPTS) / embeddings)
        assert made <= gathers_ahead(work) == math.ceil(evaluations * PROMPTS / embeddings)
