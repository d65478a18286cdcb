"""Noise levels of 1000 discrete timesteps, as ComfyUI computes them (ModelSamplingDiscrete)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

#: Terminal alpha of a schedule of zero terminal SNR: not zero, so that sigma is finite.
LAST_ALPHA = 4.8973451890853435e-08


@dataclass(frozen=True)
class DiscreteSchedule:
    """betas rise from ``start`` to ``end``, linearly in their square root ("linear") or in themselves
    ("sqrt_linear")."""

    start: float
    end: float
    kind: str = "linear"
    zero_terminal_snr: bool = False
    steps: int = 1000

    @cached_property
    def sigmas(self) -> Tensor:
        """(steps,) float32, rising."""
        if self.kind == "linear":
            betas = torch.linspace(self.start**0.5, self.end**0.5, self.steps, dtype=torch.float64) ** 2
        else:
            betas = torch.linspace(self.start, self.end, self.steps, dtype=torch.float64)
        alphas = torch.cumprod(1.0 - betas, dim=0)
        sigmas = ((1 - alphas) / alphas) ** 0.5
        return (self._rescaled(sigmas) if self.zero_terminal_snr else sigmas).float()

    @staticmethod
    def _rescaled(sigmas):
        roots = (1 / (sigmas * sigmas + 1)).sqrt()
        first = roots[0].clone()
        last = roots[-1].clone()
        alphas = ((roots - last) * first / (first - last)) ** 2
        alphas[-1] = LAST_ALPHA
        return ((1 - alphas) / alphas) ** 0.5

    def timestep(self, sigma: Tensor) -> Tensor:
        """The timestep whose noise level is nearest to ``sigma`` (0-d) on a logarithmic scale."""
        return (sigma.log().cpu() - self.sigmas.log()).abs().argmin().to(sigma.device)

    def is_highest(self, sigma: float) -> bool:
        """Does sampling that starts at ``sigma`` start from pure noise?"""
        highest = self.sigmas[-1].item()
        return sigma > highest or abs(sigma - highest) <= 1e-5 * max(sigma, highest)
