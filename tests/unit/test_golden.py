"""One process against latents of a real ComfyUI: at most 2e-4 of their standard deviation away."""

import pytest
from families import CASES, TOLERANCES
from tiny import (
    DISTANCES,
    FLUX_CASES,
    error_in_std,
    golden_request,
    is_known_distance,
    to_vae_units,
    write_checkpoint,
)
from variants import GOLDENS

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load(
        "tiny", str(write_checkpoint(tmp_path_factory.mktemp("models") / "flux-tiny.safetensors")), "default"
    )
    return engine


def test_no_golden_case_is_missing():
    """Cases are the files that are there: one that is gone, or of another name, would be tested no more."""
    golden_variants = {path.stem for path in GOLDENS.iterdir()}
    assert {*CASES, *(f"flux-dev__{case}" for case in FLUX_CASES), *golden_variants} == DISTANCES.keys()


@pytest.mark.parametrize("case", FLUX_CASES)
def test_flux_case(engine, case):
    sample, golden = golden_request(case)
    engine.check_sample(sample)
    samples, _ = engine.sample(sample, Callbacks())
    error = error_in_std(to_vae_units(samples), golden)
    assert error <= TOLERANCES["flux-dev"] and is_known_distance(f"flux-dev__{case}", error)
