"""ComfyUI's model object of a PixArt out of a released pipeline's folder: its latents and noise levels."""

import json

import diffusers
import pytest
import torch
import variants
from comfy_modules import comfy_modules
from tiny import as_folder, write_checkpoint

from backend.loading.recognition import open_checkpoint
from backend.protocol import Loaded

with comfy_modules():
    import comfy.latent_formats
    from parallel_dit.nodes.comfy_models.registry import weightless_patcher

RELEASED = {"_class_name": "Transformer2DModel", "norm_type": "ada_norm_single"}
#: Model -> what its config.json says, and ComfyUI's latent format of its VAE.
MODELS = {
    "alpha 512": ({"use_additional_conditions": None, "sample_size": 64}, comfy.latent_formats.SD15),
    "alpha 1024": ({"use_additional_conditions": None, "sample_size": 128}, comfy.latent_formats.SD15),
    "sigma 1024": ({"use_additional_conditions": False, "sample_size": 128}, comfy.latent_formats.SDXL),
}


def model_of(folder):
    checkpoint = open_checkpoint(str(folder))
    info = {
        "config": json.loads(json.dumps(checkpoint.config)),
        "conditioning": list(checkpoint.family.conditioning.accepted),
        "latent_format": None,
        "generic": checkpoint.generic,
        "dtype": "float32",
        "weights": checkpoint.comfy_shapes,
    }
    return weightless_patcher(Loaded("m", checkpoint.family.name, info)).model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("curve, end", [("linear", 0.02), ("scaled_linear", 0.012)])
def test_latents_and_noise_levels_of_a_folder(name, curve, end, tmp_path):
    entries, latent_format = MODELS[name]
    file = tmp_path / "file.safetensors"
    if name == "alpha 1024":
        variants.write(file, "pixart-alpha")
    else:
        write_checkpoint(file, "pixart-sigma")
    transformer = as_folder(file, **RELEASED, **entries)
    assert isinstance(model_of(transformer).latent_format, latent_format)
    scheduler = {
        "_class_name": "DPMSolverMultistepScheduler",
        "beta_schedule": curve,
        "beta_start": 0.0001,
        "beta_end": end,
    }
    for path, content in (
        ("model_index.json", {"_class_name": "PixArtAlphaPipeline"}),
        ("scheduler/scheduler_config.json", scheduler),
        ("vae/config.json", {"scaling_factor": latent_format().scale_factor}),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    model = model_of(tmp_path)
    assert model.latent_format.scale_factor == latent_format().scale_factor
    theirs = diffusers.DPMSolverMultistepScheduler.from_config(scheduler).alphas_cumprod
    torch.testing.assert_close(
        model.model_sampling.sigmas, ((1 - theirs) / theirs) ** 0.5, rtol=1e-4, atol=1e-5
    )
