"""Which models stay when ranks get other degrees. One process stands for one of sixteen ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
from tiny import write_shallow_flux

from backend.client.exit_report import RankFailure
from backend.client.launching import launcher
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import ARRANGING, RAN_OUT
from backend.parallel import mesh
from backend.quantization import dequantized_cache
from backend.rank.worker import Worker


@pytest.mark.parametrize(
    "degrees, stays",
    [
        ({"ulysses_degree": 8, "data_parallel_degree": 2}, True),
        ({"ulysses_degree": 16}, False),
        ({"ring_degree": 16}, True),
        ({"pipefusion_degree": 2, "data_parallel_degree": 8}, False),
    ],
    ids=str,
)
def test_models_that_the_new_degrees_fit_keep_their_weights(folder, degrees, stays):
    """The tiny Flux has eight heads, too few for sixteen ranks. Stages hold other weights. What leaves is
    loaded again, or refused by its name."""
    engine = Engine(ParallelConfig(data_parallel_degree=16), mesh.single())
    engine.load("m", str(write_shallow_flux(folder / "flux.safetensors")), "default")
    model = engine.models["m"]
    engine.rearrange(ParallelConfig(**degrees), mesh.single())
    assert engine.models == ({"m": model} if stays else {})


@pytest.mark.parametrize("degrees, left", [({"ring_degree": 16}, 1), ({"ulysses_degree": 16}, 0)], ids=str)
def test_what_does_not_stay_leaves_before_groups_are_made(folder, monkeypatch, degrees, left):
    """NCCL's memory for the new ones comes next to that of the old ones, which go last."""
    rank: Any = Worker.__new__(Worker)
    rank.mesh, rank.device = mesh.single(), "cpu"
    rank.engine = Engine(ParallelConfig(data_parallel_degree=16), rank.mesh)
    rank.engine.load("m", str(write_shallow_flux(folder / "leaves.safetensors")), "default")

    def build(*_):
        raise KeyError(len(rank.engine.models))

    monkeypatch.setattr(mesh, "build", build)
    with pytest.raises(KeyError, match=str(left)):
        rank.arrange(ParallelConfig(**degrees))


@pytest.mark.parametrize("when, may", [(ARRANGING, True), ("in the middle of a request", False)])
def test_memory_that_runs_out_between_requests_says_nothing_of_dequantized_weights(
    monkeypatch, tmp_path, when, may
):
    """None are there then. After a request that ran out none stay so until ComfyUI ends."""
    monkeypatch.delenv(dequantized_cache.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(dequantized_cache, "_have_run_out", False)
    monkeypatch.setattr(launcher, "failures", lambda *_: [])
    failure = RankFailure(0, 1, f"rank 0 {RAN_OUT} {when} (NCCL error)")
    monkeypatch.setattr(launcher, "cause_among", lambda _: failure)
    monkeypatch.setattr(launcher, "full_disk", lambda _: "")
    backend: Any = launcher.BackendProcess.__new__(launcher.BackendProcess)
    backend._private = SimpleNamespace(keep=lambda: None)
    backend._wait_for_report, backend._agent = lambda: None, SimpleNamespace(poll=lambda: 1)
    backend.folder, backend.log, backend._link = tmp_path, tmp_path / "backend.log", None
    backend.machines, backend._ranks, backend.silence = SimpleNamespace(index=0, name=""), 1, ""
    assert RAN_OUT in backend.failure_cause()
    assert dequantized_cache.may_cache_dequantized() == may
