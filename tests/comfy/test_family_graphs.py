"""Every family in a graph of a real ComfyUI, on two ranks: the golden latents."""

import json

import pytest
from families import LATENT_FORMATS, TOLERANCES
from golden_graphs import graph
from safetensors import safe_open
from tiny import GOLDEN

FAMILIES = [family for family in LATENT_FORMATS if family != "flux-dev"]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_latent_as_ksampler(family_comfy, family):
    with safe_open(GOLDEN / f"{family}__euler_simple.safetensors", "pt") as file:
        denoise = json.loads(file.metadata()["args"])["denoise"]
    run = family_comfy.run(graph(family=family, model=f"{family}.safetensors", denoise=denoise))
    assert run.status == "success", run.message or run.node_errors
    assert json.loads(run.outputs["5"]["text"][0])["error"] < TOLERANCES.get(family, 1e-4)
