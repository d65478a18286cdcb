"""Tensors of a request of the command ``sample``: noise levels, latents, and the files of results."""

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..config import ConfigError
from ..errors import quoted, reason
from ..models import discrete_schedule
from ..planner.machine import RequestEstimate, sides_of, tokens_of
from ..planner.model_shape import ModelShape
from ..protocol import Loaded, Sample
from ..runtime.whole_files import replace_file
from .sample_request import CONDITIONING, SampleRequest, check_several, read_json, read_prompt, read_tensors

#: Names under which files hold a latent: ComfyUI's SaveLatent, and ours.
LATENTS = "samples"
LATENT_NAMES = ("latent_tensor", LATENTS, "latent")


def sample_message(request: SampleRequest, loaded: Loaded, settings: dict) -> Sample:
    """Return the Sample of a request; ``settings``: fields of it that are the configuration's. Noise is drawn
    as ComfyUI draws it: on the CPU, for the whole batch, one latent after the other. Raises ConfigError."""
    latents = _latents(request)
    generator = torch.Generator().manual_seed(request.seed)
    noises = [torch.randn(latent.shape, generator=generator) for latent in latents]
    levels = noise_levels(request, loaded.info["prediction"])
    tensors = {"noise": _packed(noises), "latent": _packed(latents), "sigmas": levels}
    prompts = {"positive": request.positive} | ({"negative": request.negative} if request.cfg != 1.0 else {})
    for side, path in prompts.items():
        arguments = read_prompt(path, loaded.info["conditioning"])
        tensors |= {f"{side}.{name}": tensor for name, tensor in arguments.items()}
    shapes = [list(latent.shape[1:]) for latent in latents] if len(latents) > 1 else []
    about = (loaded.model, request.sampler, request.cfg, request.seed)
    return Sample(*about, latent_shapes=shapes, tensors=tensors, **settings)


def planned_request(request: SampleRequest, shape: ModelShape) -> RequestEstimate:
    """Return what the planner has to know of a request for a model of this ``shape``. Raises ConfigError."""
    size, batch = _first_size(request)
    prompt = {CONDITIONING.get(name, name): each for name, each in read_tensors(request.positive).items()}
    text = prompt.get("c_crossattn", torch.zeros(1, 0))
    if text.ndim < 2:
        raise ConfigError(
            f"{quoted(request.positive)} holds a prompt of shape {list(text.shape)}; write it as "
            f"(batch, tokens, features)."
        )
    steps = len(request.sigmas) - 1 if request.sigmas else request.steps
    prompts = 1 if request.cfg == 1.0 else 2
    return RequestEstimate(
        image_tokens=tokens_of(sides_of(size), shape.patch),
        text_tokens=text.shape[1],
        steps=max(1, steps),
        prompts=prompts,
        batch=batch,
    )


def _first_size(request: SampleRequest) -> tuple[list[int], int]:
    """Return [C, [T,] H, W] of the latent, of the first of several, and the batch."""
    if request.sizes:
        return request.sizes[0], request.batch
    found = read_tensors(request.latent)
    batch, *size = found[_latent_names(request.latent, found)[0]].shape
    return size, max(batch, request.batch)


def noise_levels(request: SampleRequest, prediction: str) -> Tensor:
    """Return (steps + 1,) noise levels that fall to 0, for a model of this ``prediction`` (flow, eps, v).
    Flow models: as diffusers' FlowMatchEulerDiscreteScheduler with a fixed shift. Others: as ComfyUI's
    scheduler "simple", on the timesteps of the scheduler's configuration. Raises ConfigError."""
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


def _latents(request: SampleRequest) -> list[Tensor]:
    """Return the latents to start from, in the model's space, (B, C, [T,] H, W) each: zeros for empty ones.
    Raises ConfigError for a file without one."""
    if request.sizes:
        return [torch.zeros(request.batch, *size) for size in request.sizes]
    tensors = read_tensors(request.latent)
    names = _latent_names(request.latent, tensors)
    if len(names) > 1:
        check_several(request, quoted(Path(request.latent).name), len(names))
    return [_of_batch(tensors[name].float(), request) for name in names]


def _latent_names(path: str, names: Collection[str]) -> list[str]:
    """Return which tensors of a file are its latents: one, or ``samples.0``, ``samples.1``, ..."""
    several = [f"{LATENTS}.{index}" for index in range(len(names)) if f"{LATENTS}.{index}" in names]
    latents = [name for name in LATENT_NAMES if name in names][:1] or several
    if not latents:
        raise ConfigError(f"{path} holds {', '.join(names)}; a latent is {LATENT_NAMES[0]}.")
    return latents


def _of_batch(samples: Tensor, request: SampleRequest) -> Tensor:
    factor, offset = _vae_scaling(request, samples)
    samples = (samples - offset) / factor
    return samples.expand(request.batch, *samples.shape[1:]) if len(samples) == 1 else samples


def _packed(latents: list[Tensor]) -> Tensor:
    """Return one latent as it is, several flattened one after the other, (B, 1, L)."""
    return latents[0] if len(latents) == 1 else torch.cat([x.flatten(1)[:, None] for x in latents], dim=2)


def _vae_scaling(request: SampleRequest, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return (factor, offset) by channel of ``like``: VAE units = model space * factor + offset; 1 and 0
    without a VAE's configuration."""
    config = read_json(request.vae, "config.json") if request.vae else {}
    factor = torch.as_tensor(config.get("latents_std") or 1.0) / (config.get("scaling_factor") or 1.0)
    offset = torch.as_tensor(config.get("latents_mean") or config.get("shift_factor") or 0.0)
    shape = (1, -1, *[1] * (like.ndim - 2))
    for value in (factor, offset):
        if value.numel() not in (1, like.shape[1]):
            what = f"{request.vae} scales {value.numel()} channels, but the latent has {like.shape[1]}"
            raise ConfigError(f"{what}; name the configuration of this model's VAE.")
    return factor.reshape(shape), offset.reshape(shape)


def write_result(request: SampleRequest, samples: Tensor, stats: dict, shapes: Sequence[list[int]] = ()):
    """Write a latent (B, C, [T,] H, W), given in the model's space: ``latent_tensor`` of a .latent, which
    ComfyUI's LoadLatent reads, or ``samples`` of a .safetensors; several of these ``shapes``, (B, 1, L), as
    ``samples.0``, ``samples.1``, ..."""
    space = "vae" if request.vae else "model"
    about = {"space": space, "seed": str(request.seed), "stats": json.dumps(stats, default=str)}
    path = Path(request.out)
    if shapes:  # check_several has refused .latent and a vae for several
        pieces = samples.split([math.prod(shape) for shape in shapes], dim=2)
        several = [piece.reshape(len(piece), *shape) for piece, shape in zip(pieces, shapes)]
        tensors = {f"{LATENTS}.{index}": each.contiguous() for index, each in enumerate(several)}
    else:
        factor, offset = _vae_scaling(request, samples)
        samples = (samples * factor + offset).contiguous()
        tensors = {LATENTS: samples}
    if path.suffix == ".latent":
        tensors = {"latent_tensor": samples, "latent_format_version_0": torch.empty(0)}
    try:
        replace_file(path, lambda part: save_file(tensors, part, about))
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"out is {request.out!r}, which cannot be written ({reason(error)}); free space "
            f"there, or choose another path."
        ) from None
