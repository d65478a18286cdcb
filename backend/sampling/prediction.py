"""What a model's output means: flow, eps, v, v-ddpm, in ComfyUI's arithmetic (comfy/model_sampling.py)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _unchanged(x: Tensor, sigma: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Prediction:
    """How to scale a model's input, read its output and mix noise at a noise level ``sigma`` (0-d tensor)."""

    name: str
    denoised: Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, sigma, output)
    add_noise: Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # (sigma, noise, latent, from_pure_noise)
    model_input: Callable[[Tensor, Tensor], Tensor] = _unchanged  # (x, sigma)
    finish: Callable[[Tensor, Tensor], Tensor] = _unchanged  # (x, last sigma): undo the noise level's scaling


def _minus_output(x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
    return x - output * sigma


def _denoised_v(x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
    return x / (sigma**2 + 1.0) - output * sigma / (sigma**2 + 1.0) ** 0.5


def _denoised_v_ddpm(x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
    return x / (sigma**2 + 1.0) ** 0.5 - output * sigma / (sigma**2 + 1.0) ** 0.5


def _output(x: Tensor, sigma: Tensor, output: Tensor) -> Tensor:
    return output


def _add_noise_flow(sigma: Tensor, noise: Tensor, latent: Tensor, from_pure_noise: bool) -> Tensor:
    return sigma * noise + (1.0 - sigma) * latent


def _add_noise_eps(sigma: Tensor, noise: Tensor, latent: Tensor, from_pure_noise: bool) -> Tensor:
    """Return sigma · noise + latent; from pure noise sqrt(1 + sigma²) · noise + latent."""
    return noise * (torch.sqrt(1.0 + sigma**2.0) if from_pure_noise else sigma) + latent


def _noise_alone(sigma: Tensor, noise: Tensor, latent: Tensor, from_pure_noise: bool) -> Tensor:
    return noise


def _finish_flow(x: Tensor, sigma: Tensor) -> Tensor:
    return x / (1.0 - sigma)


def _unit_variance(x: Tensor, sigma: Tensor) -> Tensor:
    return x / (sigma**2 + 1.0) ** 0.5


FLOW = Prediction("flow", denoised=_minus_output, add_noise=_add_noise_flow, finish=_finish_flow)
EPS = Prediction("eps", denoised=_minus_output, add_noise=_add_noise_eps, model_input=_unit_variance)
V = Prediction("v", denoised=_denoised_v, add_noise=_add_noise_eps, model_input=_unit_variance)
#: The model takes x at its training scale, unscaled.
V_DDPM = Prediction("v-ddpm", denoised=_denoised_v_ddpm, add_noise=_add_noise_eps)
#: A call of the model by itself: its input comes scaled, its output goes out as it is.
OUTPUT = Prediction("output", denoised=_output, add_noise=_noise_alone)
PREDICTIONS = {prediction.name: prediction for prediction in (FLOW, EPS, V, V_DDPM)}
