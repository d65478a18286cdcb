"""What a queued graph says before it runs, as far as constants tell it."""

from dataclasses import replace

import pytest
from published import FLUX
from without_comfy import on_stand_ins

from backend.models import FAMILIES


@pytest.fixture
def graph():
    """The module nodes/host/graph.py."""
    with on_stand_ins("host.graph") as module:
        yield module


def latent_of(family: str, **config):
    """The planner's model with the latents of a family."""
    latent = FAMILIES[family].latent
    patch = {"patch": config.pop("patch")} if "patch" in config else {}
    return replace(FLUX, family=family, pixels=latent.pixels(config), **patch)


def queued(size: dict) -> dict:
    """A loader, what makes a latent of this size, and a sampler."""
    return {
        "1": {"class_type": "LoadParallelDiT", "inputs": {"model_name": "a"}},
        "2": {"class_type": "EmptyLatent", "inputs": size},
        "3": {"class_type": "ParallelSampler", "inputs": {"dit": ["1", 0], "latent_image": ["2", 0]}},
    }


@pytest.mark.parametrize(
    "family, config, size, tokens",
    [
        ("flux", {}, (1024, 1024), 64 * 64),
        ("flux2", {"patch": (1, 1, 1)}, (1024, 1024), 64 * 64),
        ("ideogram4", {"patch": (1, 1, 1)}, (1024, 1024), 64 * 64),
        ("qwen-image-2.1", {"patch": (1, 1, 1)}, (1024, 1024), 64 * 64),
        ("sana", {"patch": (1, 1, 1)}, (1024, 1024), 32 * 32),
        ("wan", {"out_channels": 16}, (832, 480, 81), 21 * 30 * 52),
        ("wan", {"out_channels": 48}, (1280, 704, 121), 31 * 22 * 40),
        ("minimax-h3", {}, (1024, 576, 97), 25 * 18 * 32),
        ("minimax-h3-curves", {}, (1024, 576, 97), 25 * 18 * 32),
        ("hunyuan-video-1.5", {"patch": (1, 1, 1)}, (1280, 720, 121), 31 * 45 * 80),
        ("ltx2", {"patch": (1, 1, 1)}, (1280, 704, 121), 16 * 22 * 40),
    ],
)
def test_tokens_are_counted_by_the_pixels_of_the_familys_latents(graph, family, config, size, tokens):
    """Twice the pixels a side are a quarter of the tokens: counted by 8, models that fit were refused."""
    named = dict(zip(("width", "height", "length"), size))
    request = graph.request_of_graph(queued(named), "1", latent_of(family, **config))
    assert request.image_tokens == tokens
