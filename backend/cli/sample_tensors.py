"""Tensors of a request of the command ``sample``: noise levels, latents, and the files of results."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..config import ConfigError
from ..models import discrete_schedule
from ..protocol import Loaded, Sample
from .sample_request import SampleRequest, read_json, read_prompt, read_tensors

#: Names under which files hold a latent: ComfyUI's SaveLatent, and ours.
LATENT_NAMES = ("latent_tensor", "samples", "latent")


def sample_message(request: SampleRequest, loaded: Loaded, settings: dict) -> Sample:
    """Return the Sample of a request; ``settings``: fields of it that are the configuration's. Noise is drawn
    as ComfyUI draws it: on the CPU, for the whole batch. Raises ConfigError."""
    latent = _latent(request)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(request.seed))
    levels = noise_levels(request, loaded.info["prediction"])
    tensors = {"noise": noise, "latent": latent, "sigmas": levels}
    prompts = {"positive": request.positive} | ({"negative": request.negative} if request.cfg != 1.0 else {})
    for side, path in prompts.items():
        arguments = read_prompt(path, loaded.info["conditioning"])
        tensors |= {f"{side}.{name}": tensor for name, tensor in arguments.items()}
    return Sample(loaded.model, request.sampler, request.cfg, request.seed, tensors=tensors, **settings)


def noise_levels(request: SampleRequest, prediction: str) -> Tensor:
    """Return (steps + 1,) noise levels that fall to 0, for a model of this ``prediction`` (flow, eps, v).

    Flow models: as diffusers' FlowMatchEulerDiscreteScheduler with a fixed shift. Others: as ComfyUI's
    scheduler "simple", on the timesteps of the scheduler's configuration. Raises ConfigError.
    """
    if request.sigmas:
        return _given(request.sigmas)
    scheduler = read_json(request.scheduler, "scheduler_config.json") if request.scheduler else None
    if prediction == "flow":
        shift = request.shift or float((scheduler or {}).get("shift", 1.0))
        fractions = torch.linspace(1, 0, request.steps + 1, dtype=torch.float64)
        return (shift * fractions / (1 + (shift - 1) * fractions)).float()
    if request.shift:
        raise ConfigError(f"shift is {request.shift:g}, but this is no flow model; leave it out.")
    schedule = discrete_schedule.of_scheduler(scheduler)
    if schedule is None:
        raise ConfigError(
            f"the noise levels of a model that predicts {prediction} are those of its training; name the "
            f"scheduler_config.json of its diffusers folder as scheduler, or write sigmas."
        )
    if request.steps > schedule.steps:
        raise ConfigError(f"steps is {request.steps}, but the schedule has {schedule.steps} timesteps.")
    stride = schedule.steps / request.steps
    picked = [schedule.sigmas[-(1 + int(i * stride))].item() for i in range(request.steps)]
    return torch.tensor([*picked, 0.0])


def _given(levels: list) -> Tensor:
    numbers = all(isinstance(level, (int, float)) and not isinstance(level, bool) for level in levels)
    if len(levels) < 2 or not numbers:
        raise ConfigError("sigmas is no list of at least two numbers; write one more than there are steps.")
    return torch.tensor(levels, dtype=torch.float32)


def _latent(request: SampleRequest) -> Tensor:
    """Return the latent to start from, in the model's space: (B, C, [T,] H, W), zeros for an empty one."""
    if not isinstance(request.latent, str):
        return torch.zeros(request.batch, *request.latent)
    found = read_tensors(request.latent)
    name = next((name for name in LATENT_NAMES if name in found), None)
    if name is None:
        raise ConfigError(f"{request.latent} holds {', '.join(found)}; a latent is {LATENT_NAMES[0]}.")
    samples = found[name].float()
    factor, offset = _vae_scaling(request, samples)
    samples = (samples - offset) / factor
    return samples.expand(request.batch, *samples.shape[1:]) if len(samples) == 1 else samples


def _vae_scaling(request: SampleRequest, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return (factor, offset) with VAE units = model space * factor + offset, by channel of ``like``; 1 and 0
    without a VAE's configuration."""
    config = read_json(request.vae, "config.json") if request.vae else {}
    factor = torch.as_tensor(config.get("latents_std") or 1.0) / (config.get("scaling_factor") or 1.0)
    offset = torch.as_tensor(config.get("latents_mean") or 0.0) + (config.get("shift_factor") or 0.0)
    shape = (1, -1, *[1] * (like.ndim - 2))
    for value in (factor, offset):
        if value.numel() not in (1, like.shape[1]):
            what = f"{request.vae} scales {value.numel()} channels, but the latent has {like.shape[1]}"
            raise ConfigError(f"{what}; name the configuration of this model's VAE.")
    return factor.reshape(shape), offset.reshape(shape)


def write_result(request: SampleRequest, samples: Tensor, stats: dict):
    """Write a latent (B, C, [T,] H, W), given in the model's space: ``latent_tensor`` of a .latent, which
    ComfyUI's LoadLatent reads, or ``samples`` of a .safetensors."""
    factor, offset = _vae_scaling(request, samples)
    samples = (samples * factor + offset).contiguous()
    space = "vae" if request.vae else "model"
    about = {"space": space, "seed": str(request.seed), "stats": json.dumps(stats, default=str)}
    path = Path(request.out)
    tensors = {"samples": samples}
    if path.suffix == ".latent":
        tensors = {"latent_tensor": samples, "latent_format_version_0": torch.empty(0)}
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, about)
    part.replace(path)
