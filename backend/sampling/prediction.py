"""What a model's output means: flow (rectified flow), eps, v. The arithmetic is ComfyUI's
(comfy/model_sampling.py), element by element."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Prediction:
    """How to scale a model's input, read its output and mix noise at a noise level ``sigma`` (0-d tensor)."""

    name: str
    model_input: Callable[[Tensor, Tensor], Tensor]  # (x, sigma)
    denoised: Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, sigma, output)
    add_noise: Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # (sigma, noise, latent, from_pure_noise)
    finish: Callable[[Tensor, Tensor], Tensor]  # (x, last sigma): undo the noise level's scaling


def _add_noise_eps(sigma, noise, latent, from_pure_noise):
    return noise * (torch.sqrt(1.0 + sigma**2.0) if from_pure_noise else sigma) + latent


FLOW = Prediction(
    "flow",
    model_input=lambda x, sigma: x,
    denoised=lambda x, sigma, output: x - output * sigma,
    add_noise=lambda sigma, noise, latent, pure: sigma * noise + (1.0 - sigma) * latent,
    finish=lambda x, sigma: x / (1.0 - sigma),
)
EPS = Prediction(
    "eps",
    model_input=lambda x, sigma: x / (sigma**2 + 1.0) ** 0.5,
    denoised=lambda x, sigma, output: x - output * sigma,
    add_noise=_add_noise_eps,
    finish=lambda x, sigma: x,
)
V = Prediction(
    "v",
    model_input=EPS.model_input,
    denoised=lambda x, sigma, output: x / (sigma**2 + 1.0) - output * sigma / (sigma**2 + 1.0) ** 0.5,
    add_noise=_add_noise_eps,
    finish=lambda x, sigma: x,
)
V_DDPM = Prediction(
    "v-ddpm",  # the model takes x at its training scale, unscaled
    model_input=lambda x, sigma: x,
    denoised=lambda x, sigma, output: x / (sigma**2 + 1.0) ** 0.5 - output * sigma / (sigma**2 + 1.0) ** 0.5,
    add_noise=_add_noise_eps,
    finish=lambda x, sigma: x,
)
#: A call of the model by itself: its input comes scaled, its output goes out as it is.
OUTPUT = Prediction(
    "output",
    model_input=lambda x, sigma: x,
    denoised=lambda x, sigma, output: output,
    add_noise=lambda sigma, noise, latent, pure: noise,
    finish=lambda x, sigma: x,
)
PREDICTIONS = {prediction.name: prediction for prediction in (FLOW, EPS, V, V_DDPM)}
