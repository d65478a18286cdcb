"""ComfyUI's model object for a transformer that no family file describes: its scheduler's noise levels, its
VAE's scaling, the arguments that it takes."""

import json

import pytest
import torch
from comfy_modules import comfy_modules
from fallback_models import CUT, write

from backend.loading.recognition import open_checkpoint
from backend.protocol import Loaded

with comfy_modules():
    import comfy.samplers
    from parallel_dit.nodes.comfy_models.registry import family_named, weightless_patcher


def loaded(folder, name, vae=None, **scheduler):
    """What the backend tells of a pipeline's folder."""
    write(folder, name, **scheduler)
    if vae:
        (folder / "vae").mkdir()
        (folder / "vae/config.json").write_text(json.dumps(vae))
    checkpoint = open_checkpoint(str(folder))
    return Loaded(
        "m",
        checkpoint.family.name,
        {
            "config": checkpoint.config,
            "conditioning": list(checkpoint.family.conditioning.accepted),
            "latent_format": None,
            "dtype": "float32",
            "generic": json.loads(json.dumps(checkpoint.generic)),
        },
    )


def test_flow_with_the_schedulers_shift(tmp_path):
    model = weightless_patcher(
        loaded(
            tmp_path,
            CUT[0],
            {"scaling_factor": 0.13025},
            _class_name="FlowMatchEulerDiscreteScheduler",
            shift=1.73,
        )
    ).model
    sigmas = comfy.samplers.calculate_sigmas(model.model_sampling, "simple", 4)
    linear = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    torch.testing.assert_close(sigmas, 1.73 * linear / (1 + 0.73 * linear), atol=1e-6, rtol=0)
    latent = torch.randn(1, 4, 8, 8)
    torch.testing.assert_close(model.process_latent_in(latent), latent * 0.13025)
    torch.testing.assert_close(model.process_latent_out(model.process_latent_in(latent)), latent)


def test_noise_levels_of_a_discrete_scheduler_are_the_backends(tmp_path):
    info = loaded(
        tmp_path,
        CUT[1],
        _class_name="DDIMScheduler",
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
    )
    model = weightless_patcher(info).model
    schedule = open_checkpoint(str(tmp_path)).family.noise.schedule({})
    torch.testing.assert_close(model.model_sampling.sigmas, schedule.sigmas, rtol=1e-6, atol=0)
    assert "V_PREDICTION" in str(model.model_type)


def test_mean_and_deviation_of_a_video_vae(tmp_path):
    mean, deviation = [0.1, -0.2, 0.3, 0.4], [1.0, 2.0, 0.5, 4.0]
    info = loaded(tmp_path, CUT[2], {"latents_mean": mean, "latents_std": deviation})
    model, latent = weightless_patcher(info).model, torch.randn(1, 4, 3, 8, 8)

    def column(values):
        return torch.tensor(values).view(1, 4, 1, 1, 1)

    torch.testing.assert_close(model.process_latent_in(latent), (latent - column(mean)) / column(deviation))
    assert model.latent_format.latent_dimensions == 3 and model.latent_format.latent_channels == 4


@pytest.mark.parametrize(
    "key, argument",
    [("cross_attn", "c_crossattn"), ("pooled_output", "y"), ("attention_mask", "attention_mask")],
)
def test_takes_the_arguments_that_the_transformer_takes(key, argument, tmp_path):
    info = loaded(tmp_path, CUT[1])
    info.info["generic"]["conditioning"] = ["c_crossattn", "y", "attention_mask"]
    value = torch.randn(1, 9, 24)
    found = weightless_patcher(info).model.extra_conds(
        **{"device": "cpu", "noise": torch.zeros(1, 4, 8, 8), key: value}
    )
    assert torch.equal(found[argument].cond, value) and set(found) == {argument}
    assert not family_named(info).needs
