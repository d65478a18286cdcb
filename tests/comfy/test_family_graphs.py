"""Every family in a graph of a real ComfyUI, on two ranks: the golden latents."""

import json

import pytest
from families import LATENT_FORMATS, TOLERANCES
from tiny import GOLDEN

FAMILIES = [family for family in LATENT_FORMATS if family != "flux-dev"]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_latent_as_ksampler(family_comfy, family):
    file = str(GOLDEN / f"{family}__euler_simple.safetensors")
    run = family_comfy.run(
        {
            "1": {"class_type": "TestGoldenInputs", "inputs": {"file": file, "change": "nothing"}},
            "2": {"class_type": "ParallelConfig", "inputs": {"ulysses_degree": 2, "device": "cpu"}},
            "3": {
                "class_type": "LoadParallelDiT",
                "inputs": {"config": ["2", 0], "model_name": f"{family}.safetensors"},
            },
            "4": {
                "class_type": "ParallelSampler",
                "inputs": {
                    "dit": ["3", 0],
                    "positive": ["1", 0],
                    "negative": ["1", 1],
                    "latent_image": ["1", 2],
                    "seed": 42,
                    "steps": 6,
                    "cfg": 3.0,
                    "sampler_name": "euler",
                    "scheduler": "simple",
                    "denoise": 1.0,
                },
            },
            "5": {"class_type": "TestGoldenError", "inputs": {"samples": ["4", 0], "file": file}},
        }
    )
    assert run.status == "success", run.message or run.node_errors
    assert json.loads(run.outputs["5"]["text"][0])["error"] < TOLERANCES.get(family, 1e-4)
