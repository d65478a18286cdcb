"""Which models stay when ranks get other degrees. One process stands for one of sixteen ranks."""

import pytest
from tiny import write_shallow_flux

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh


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
