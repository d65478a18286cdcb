"""What a model's output means: flow (rectified flow), eps, v. The arithmetic is ComfyUI's
(comfy/model_sampling.py), element by element."""

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


def _add_noise_eps(sigma, noise, latent, from_pure_noise):
    return noise * (torch.sqrt(1.0 + sigma**2.0) if from_pure_noise else sigma) + latent


FLOW = Prediction(
    "flow",
    denoised=lambda x, sigma, output: x - output * sigma,
    add_noise=lambda sigma, noise, latent, pure: sigma * noise + (1.0 - sigma) * latent,
    finish=lambda x, sigma: x / (1.0 - sigma),
)
EPS = Prediction(
    "eps",
    denoised=lambda x, sigma, output: x - output * sigma,
    add_noise=_add_noise_eps,
    model_input=lambda x, sigma: x / (sigma**2 + 1.0) ** 0.5,
)
V = Prediction(
    "v",
    denoised=lambda x, sigma, output: x / (sigma**2 + 1.0) - output * sigma / (sigma**2 + 1.0) ** 0.5,
    add_noise=_add_noise_eps,
    model_input=EPS.model_input,
)
V_DDPM = Prediction(
    "v-ddpm",  # the model takes x at its training scale, unscaled
    denoised=lambda x, sigma, output: x / (sigma**2 + 1.0) ** 0.5 - output * sigma / (sigma**2 + 1.0) ** 0.5,
    add_noise=_add_noise_eps,
)
#: A call of the model by itself: its input comes scaled, its output goes out as it is.
OUTPUT = Prediction(
    "output",
    denoised=lambda x, sigma, output: output,
    add_noise=lambda sigma, noise, latent, pure: noise,
)
PREDICTIONS = {prediction.name: prediction for prediction in (FLOW, EPS, V, V_DDPM)}
