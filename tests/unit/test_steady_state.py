"""What a step does besides its model calls waits for no device: modulation of later chunks, and solvers."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import dry_run
import launches
from meta_device import META, meta_device
from operation_count import Count
from torch import Tensor, nn

from backend.config import ParallelConfig
from backend.hardware.host_memory import on_device
from backend.models.latent_tokens import TokenGrid
from backend.parallel.modulation import modulation_cache, modulation_chunks
from backend.parallel.modulation.modulation_cache import CurrentCall
from backend.parallel.sequence import Span
from backend.parallel.step_context import StepContext
from backend.protocol.solver_names import PERCENTS, SOLVERS
from backend.sampling.guidance import Prompt
from backend.sampling.prediction import PREDICTIONS
from backend.sampling.request import Request
from backend.sampling.step_loop import Callbacks, Denoiser

AHEAD = [name for name in launches.FAMILIES if launches.checkpoint_of(name).family.cache.modulation]


@pytest.mark.parametrize("family", AHEAD)
def test_modulation_of_a_later_chunk_is_not_waited_for(monkeypatch, family):
    """Where each evaluation is a chunk, a step does more, and waits no more. Stages compute modulation for
    each other, and exchange it."""
    # which of the embeddings are equal, meta tensors do not say
    monkeypatch.setattr(modulation_cache, "equal_rows", lambda every: torch.arange(len(every)))
    load = launches.load

    def staged(checkpoint, config, mesh):
        return load(checkpoint, config, mesh, checkpoint.stages(config))

    monkeypatch.setattr(launches, "load", staged)
    for method in ("one rank", "pp2"):
        usual, _ = launches.measure(family, method, timing=False)
        with monkeypatch.context() as patched:
            patched.setattr(modulation_chunks, "AHEAD", 1)
            found, _ = launches.measure(family, method, timing=False)
        assert found.device_ops > usual.device_ops, method
        assert (found.cpu_ops, found.waits) == (usual.cpu_ops, usual.waits), method


def test_rows_of_one_sample_are_not_waited_for():
    """A pipeline takes samples one by one; of two timesteps a sample has two rows."""
    table = torch.arange(8.0).view(4, 2)
    context = StepContext("positive", 0, Span(1, 2))
    for device in (torch.device("cpu"), META):
        current = CurrentCall(context=context, rows={("positive", 0): (3, 1, 2, 0)})
        count = Count()
        with meta_device(count), torch.inference_mode(), count:
            on_device = table.to(device)
            count.active = True
            rows = current.take(on_device, context, "positive", shared=False, count=2)
            count.active = False
        assert rows.shape == (2, 2) and not count.waits
    current = CurrentCall(context=context, rows={("positive", 0): (3, 1, 2, 0)})
    assert current.take(table, context, "positive", shared=False, count=2).tolist() == [
        [2.0, 3.0],
        [0.0, 1.0],
    ]


@pytest.mark.full
def test_gathered_modulation_of_a_later_chunk_is_not_waited_for(monkeypatch):
    """Of sharded weights, at the released size: a step gathers those of modulation too."""
    monkeypatch.setattr(modulation_cache, "equal_rows", lambda every: torch.arange(len(every)))
    usual = dry_run.run("sd3", "fsdp", 2, 1)
    monkeypatch.setattr(modulation_chunks, "AHEAD", 1)
    found = dry_run.run("sd3", "fsdp", 2, 1)
    assert found.sent["weights"] > usual.sent["weights"] and not found.waits


def test_offloaded_modulation_is_not_waited_for(monkeypatch):
    """Its weights are sent to the device, and on page-locked memory the host goes on."""
    layer = nn.Linear(4, 8)
    copied = []
    own = Tensor.to

    def to(self, device, non_blocking=False):
        copied.append(non_blocking)
        return own(self, device)

    monkeypatch.setattr(Tensor, "to", to)
    with on_device(layer, META):
        assert layer.weight.is_meta
    assert copied == [True, True] and layer.weight.is_cpu


GRID = TokenGrid((4, 8, 8), (1, 2, 2))
BATCH, STEPS = 2, 5
#: Noise levels of a schedule, and the models' own after parts of sampling (PERCENTS).
LEVELS = {"flow": (1.0, (0.9999, 0.8, 0.2)), "eps": (14.6, (14.6, 4.0, 0.3))}


class Model:
    """Takes the place of the Runner: the model's output is its input."""

    def __init__(self, is_last: bool):
        self.is_last = is_last

    def plan(self, sigmas):
        pass

    modulate_ahead = expect = plan

    def begin_evaluation(self, index, ratio):
        pass

    def drain(self):
        pass

    def run(self, x, sigma, context):
        patch = x[context.samples]
        return (patch if context.image is None else patch[:, context.image.indices]) if self.is_last else None


class Loop(Denoiser):
    """The step loop, which counts from the first evaluation to the last."""

    def _start_solvers(self):
        super()._start_solvers()
        COUNT.active = True

    def _drain(self):
        COUNT.active = False
        super()._drain()


COUNT = Count()


def request_of(solver: str, prediction: str, config: ParallelConfig) -> Request:
    """A request with a mask, and with prompts that have weights, masks and ranges."""
    first, percents = LEVELS[prediction]
    tokens = torch.zeros(BATCH, GRID.tokens, GRID.features, device=META)
    prompts = {
        "positive": Prompt("positive", weight=tokens),
        "positive2": Prompt("positive", weight=0.5, lowest=0.4 * first),
        "negative": Prompt("negative"),
    }
    counts: dict[str, Any] = {"batch": BATCH, "own_samples": slice(0, BATCH)}
    return Request(
        config=config,
        prediction=PREDICTIONS[prediction],
        sigmas=torch.linspace(first, 0, STEPS + 1),
        noise=tokens,
        latent=tokens,
        grid=GRID,
        prompts=prompts,
        conditioning={name: {} for name in prompts},
        reference_tokens=dict.fromkeys(prompts, 0),
        solver=solver,
        cfg=4.0,
        mask=tokens,
        percent_sigmas=dict(zip(PERCENTS, percents)),
        **counts,
    )


@pytest.mark.parametrize("prediction", LEVELS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_no_solver_waits(solver, prediction):
    """Of one rank, and of the first stage of two, in every step and between them."""
    for config in (ParallelConfig(), ParallelConfig(pipefusion_degree=2)):
        config = replace(config, num_pipeline_patch=2 * config.pipefusion_degree - 2).validate()
        COUNT.reset()
        with meta_device(COUNT), torch.inference_mode(), COUNT:
            model = Model(is_last=config.pipefusion_degree == 1)
            mesh = launches.mesh_of(config, 0)
            loop = Loop(mesh, request_of(solver, prediction, config), cast(Any, model), Callbacks())
            loop.run()
        assert COUNT.device.total() > STEPS and not COUNT.waits
