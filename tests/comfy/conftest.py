"""One real ComfyUI for all tests of this folder, or a reason why there is none."""

import functools
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pack  # noqa: F401  # before parallel_dit, which it makes importable as ComfyUI does
import tiny
import variants
from comfy_server import ComfyServer
from families import LATENT_FORMATS
from golden_graphs import error_of, graph, ranks_of
from parallel_dit.backend.client import pool
from servers import comfy_over


@pytest.fixture(scope="session", autouse=True)
def measurements_of_the_tests(tmp_path_factory):
    """What auto measures is cached for the tests alone (client/auto/measurements.py)."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def start_comfy(tmp_path_factory):
    """start_comfy() -> a new ComfyServer with the pack as ``parallel-dit`` and a tiny Flux as
    ``tiny-flux.safetensors``."""
    checkpoint = tiny.write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-flux.safetensors")

    def start() -> ComfyServer:
        folder = tmp_path_factory.mktemp("comfy")
        (folder / "models/diffusion_models").mkdir(parents=True)
        (folder / "models/diffusion_models/tiny-flux.safetensors").symlink_to(checkpoint)
        return servers.enter_context(comfy_over(folder))

    with ExitStack() as servers:
        yield start


@pytest.fixture(scope="session")
def comfy(start_comfy):
    """A ComfyServer that every test leaves as it found it."""
    return start_comfy()


@pytest.fixture
def ranks(comfy) -> dict[int, str]:
    """The ranks of TWO_RANKS with the tiny Flux, running whatever an earlier test left."""
    error_of(comfy.run(graph()))
    return ranks_of(comfy)


@pytest.fixture(scope="session")
def family_comfy(tmp_path_factory):
    """A ComfyServer with a tiny checkpoint of every golden family and of every variant,
    FAMILY.safetensors."""
    folder = tmp_path_factory.mktemp("families")
    models = folder / "models/diffusion_models"
    with comfy_over(folder) as server:  # written where there is a server alone: gigabytes
        for family in LATENT_FORMATS:
            tiny.write_checkpoint(models / f"{family}.safetensors", family)
        for variant in variants.VARIANTS:
            variants.write(models / f"{variant}.safetensors", variant)
        yield server
    shutil.rmtree(models)


@pytest.fixture(scope="module")
def pairs(folder):
    """Name of a golden family -> its Pair."""
    from pairs import Pair  # here, since it imports ComfyUI

    yield functools.cache(lambda name: Pair(name, folder))
    pool.close_all()


@pytest.fixture
def flux(pairs):
    return pairs("flux-dev")
