"""A live backend of two ranks and requests for it: the same one for every test that leaves it alive, also for
the next module's."""

from dataclasses import replace

import pytest
from shallow import shallow_request
from tiny import write_shallow_flux

from backend import protocol
from backend.client import pool
from backend.config import ParallelConfig

CONFIG = ParallelConfig(pipefusion_degree=2, device="cpu")


@pytest.fixture(scope="module")
def checkpoint(folder):
    return str(write_shallow_flux(folder / "flux-tiny.safetensors"))


@pytest.fixture
def backend(checkpoint):
    return pool.backend_for(CONFIG)


@pytest.fixture(scope="module", autouse=True)
def free_at_the_end():
    """The next module's tests look at what a backend has loaded; its ranks serve them too."""
    yield
    live = pool.launched()
    if live is not None:
        for model in live.client.request(protocol.Ping()).models:
            live.client.request(protocol.Unload(model))
        live.models.clear()


def request_for(backend, checkpoint, case="euler_simple", **changes) -> tuple[protocol.Sample, object]:
    """A golden case's request for the model that ``backend`` has loaded, with ``changes`` of its fields, and
    the latent that one process makes of it."""
    sample, expected = shallow_request(case, backend.load(checkpoint).model)
    return protocol.Sample(**{**vars(sample), "num_pipeline_patch": 1, **changes}), expected


def with_tensors(request, **tensors):
    return replace(request, tensors={**request.tensors, **tensors})
