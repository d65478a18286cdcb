"""The shifts that Parallel Sampler's page states for usual sizes, against ComfyUI's own nodes."""

import re

import pytest
from comfy_modules import comfy_modules
from native import native_model
from pack import ROOT

with comfy_modules():
    from comfy_extras import nodes_lt
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux


@pytest.mark.parametrize("page", ["ParallelSampler.md", "ParallelSampler/zh.md"])
def test_they_are_those_of_the_nodes(page):
    """Flux's and LTX's, which depend on the size."""
    text = (ROOT / "web/docs" / page).read_text()
    stated = dict(re.findall(r"(\d+ x \d+(?: x \d+)?): (\d\.\d\d)", text))
    assert stated.keys() == {"1024 x 1024", "1920 x 1080", "768 x 512 x 97"}
    model = native_model("flux-dev")
    for size, shift in stated.items():
        width, height, *frames = map(int, size.split(" x "))
        if frames:
            latent = nodes_lt.EmptyLTXVLatentVideo.execute(width, height, *frames).result[0]
            patched = nodes_lt.ModelSamplingLTXV.execute(model, 2.05, 0.95, latent).result[0]
        else:
            (patched,) = ModelSamplingFlux().patch(model, 1.15, 0.5, width, height)
        assert f"{patched.get_model_object('model_sampling').shift:.2f}" == shift
