"""PixArt's folders as they were released: an older name of the class, and settings of the pipeline."""

import json
from pathlib import Path

import diffusers
import pytest
import torch
from families import golden, to_vae_units
from ranks.flux_requests import shortened
from tiny import as_folder, error_in_std, write_checkpoint
from variants import request
from variants import write as write_variant

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.models import pixart
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks

#: What the released transformers' config.json say besides their sizes.
RELEASED = {"_class_name": "Transformer2DModel", "norm_type": "ada_norm_single", "num_vector_embeds": None}
SCHEDULER = {
    "_class_name": "DPMSolverMultistepScheduler",
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "prediction_type": "epsilon",
}


def pipeline(file: Path, scheduler: dict = SCHEDULER, scale: object = 0.13025, **entries) -> Path:
    """The weights of a single file as a released pipeline's folder; ``entries``: of the transformer."""
    folder = file.parent
    as_folder(file, **RELEASED, **entries)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "PixArtSigmaPipeline"}))
    for name, content in (
        ("scheduler/scheduler_config.json", scheduler),
        ("vae/config.json", {"scaling_factor": scale}),
    ):
        (folder / name).parent.mkdir()
        (folder / name).write_text(json.dumps(content))
    return folder


def sampled(path: Path, sample):
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "default")
    engine.check_sample(sample)
    return engine.sample(sample, Callbacks())[0]


def test_sigma_from_its_released_folder(tmp_path):
    """The latent is that of ComfyUI from the single file."""
    file = write_checkpoint(tmp_path / "file.safetensors", "pixart-sigma")
    folder = pipeline(file, interpolation_scale=2)
    sample, latent = golden("pixart-sigma__euler_simple")
    found = to_vae_units("pixart-sigma", sampled(folder, sample))
    assert error_in_std(found, latent) <= 1e-4
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.family.name == "pixart" and checkpoint.config["latent_scale"] == 0.13025
    theirs = diffusers.DPMSolverMultistepScheduler.from_config(SCHEDULER)
    want = ((1 - theirs.alphas_cumprod) / theirs.alphas_cumprod) ** 0.5
    torch.testing.assert_close(pixart.schedule(checkpoint.config).sigmas, want, rtol=1e-4, atol=1e-5)


def test_alpha_from_its_released_folder(tmp_path):
    """It says neither that it is told the image's size nor how positions are scaled."""
    file = write_variant(tmp_path / "file.safetensors", "pixart-alpha")
    sample = request("pixart-alpha")
    want = sampled(file, sample)
    folder = pipeline(file, scale=0.18215, use_additional_conditions=None)
    assert error_in_std(sampled(folder, sample), want) <= 1e-4


def test_the_folders_schedule_is_taken(tmp_path):
    file = write_checkpoint(tmp_path / "file.safetensors", "pixart-sigma")
    folder = pipeline(file, SCHEDULER | {"beta_schedule": "scaled_linear", "beta_end": 0.012})
    schedule = pixart.schedule(open_checkpoint(str(folder)).config)
    assert (schedule.start, schedule.end, schedule.kind) == (0.0001, 0.012, "linear")
    assert pixart.schedule(open_checkpoint(str(file)).config) == pixart.SCHEDULE


def test_more_steps_make_no_more_schedules(tmp_path, monkeypatch):
    """A schedule computes its noise levels once: it was a new one in every evaluation."""
    folder = pipeline(write_checkpoint(tmp_path / "file.safetensors", "pixart-sigma"))
    sample, _ = golden("pixart-sigma__euler_simple", "tiny")
    schedule = pixart.DiscreteSchedule
    made = []

    def counted(**entries):
        made.append(entries)
        return schedule(**entries)

    monkeypatch.setattr(pixart, "DiscreteSchedule", counted)
    counts = []
    for steps in (1, 3):
        made.clear()
        sampled(folder, shortened(sample, steps))
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "scheduler, scale, words",
    [
        ({"prediction_type": "v_prediction"}, 1.0, "predicts v, and PixArt predicts noise"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, 1.0, "predicts flow, and PixArt predicts"),
        ({"beta_schedule": "squaredcos_cap_v2"}, 1.0, "beta_schedule 'squaredcos_cap_v2'"),
        ({"beta_end": "much"}, 1.0, "betas from 0.0001 to 'much' in 1000 timesteps"),
        ({"num_train_timesteps": 10**9}, 1.0, "in 1000000000 timesteps"),
        ({}, -1.0, "scaling_factor of the pipeline's VAE is -1.0"),
    ],
)
def test_settings_that_do_not_fit(scheduler, scale, words, tmp_path):
    file = write_checkpoint(tmp_path / "file.safetensors", "pixart-sigma")
    with pytest.raises(UnsupportedError, match=words):
        open_checkpoint(str(pipeline(file, SCHEDULER | scheduler, scale)))
