"""What a solver integrates, and the changes of variable that several solvers share."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ...protocol.solver_names import FIRST_PERCENT
from ..prediction import FLOW, Prediction

#: Yields (x, sigma, step); is sent the prediction, or (guided, negative's) for *_cfg_pp; returns the final x.
Steps = Generator[tuple[Tensor, Tensor, int], Any, Tensor]


@dataclass(frozen=True)
class Problem:
    """What a solver integrates, for the tokens that it steps.

    sigmas: (steps + 1,), on the CPU, so that no decision or coefficient waits for an accelerator. They may
    rise, but not for solvers that ask for ``brownian``.
    noise: ``noise(k)`` is the k-th fresh Gaussian draw of the request, in the shape of the solver's x.
    brownian: ``brownian(a, b)`` is a Brownian path's increment between the noise levels a and b, over its
    standard deviation.
    percent_to_sigma: the model's noise level after this fraction of sampling (0 to 1), as ComfyUI's
    model_sampling has it.
    Random numbers belong to the whole latent, so they depend on neither patches nor ranks.
    """

    sigmas: Tensor
    prediction: Prediction
    noise: Callable[[int], Tensor]
    brownian: Callable[[Tensor, Tensor], Tensor]
    percent_to_sigma: Callable[[float], float]

    @property
    def steps(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        return ((i, self.sigmas[i], self.sigmas[i + 1]) for i in range(len(self.sigmas) - 1))

    @property
    def flow(self) -> bool:
        """Return whether x = (1 - sigma) · data + sigma · noise, rather than data + sigma · noise."""
        return self.prediction is FLOW

    def draws(self) -> Callable[[], Tensor]:
        """Return a source of fresh noise, in the order in which it is asked for."""
        index = count()
        return lambda: self.noise(next(index))

    def half_log_snr(self, sigma: Tensor) -> Tensor:
        """Return lambda = log(alpha / sigma)."""
        return sigma.logit().neg() if self.flow else sigma.log().neg()

    def sigma_at(self, half_log_snr: Tensor) -> Tensor:
        """Invert half_log_snr."""
        return half_log_snr.neg().sigmoid() if self.flow else half_log_snr.neg().exp()

    def alpha(self, sigma: Tensor) -> Tensor:
        """Return the factor of the data in x."""
        return sigma * self.half_log_snr(sigma).exp()

    def with_finite_snr(self) -> "Problem":
        """Return the same problem with a first sigma that has a half_log_snr."""
        if not self.flow or self.sigmas[0] < 1:
            return self
        sigmas = self.sigmas.clone()
        sigmas[0] = self.percent_to_sigma(FIRST_PERCENT)
        return replace(self, sigmas=sigmas)


def weighted(weights, terms: Sequence[Tensor]) -> Tensor:
    """Add up ``terms`` times ``weights``, in their order."""
    total = weights[0] * terms[0]
    for weight, term in zip(weights[1:], terms[1:]):
        total = total + weight * term
    return total


def euler_step(x: Tensor, denoised: Tensor, sigma: Tensor, target: Tensor) -> Tensor:
    """Step straight from ``sigma`` to the noise level ``target``."""
    return x + (x - denoised) / sigma * (target - sigma)


def blend(x: Tensor, denoised: Tensor, ratio: Tensor) -> Tensor:
    """Take the same step by ``ratio`` = target / sigma; each solver has the form that rounds as ComfyUI's."""
    return ratio * x + (1 - ratio) * denoised


def ancestral_split(sigma: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return (down, up): integrate to ``down``, then fresh noise of level ``up`` makes it ``target`` (x =
    data + sigma · noise)."""
    # not a number where the schedule rises: ``target`` then
    up = torch.fmin(target, (target**2 * (sigma**2 - target**2) / sigma**2) ** 0.5)
    return (target**2 - up**2) ** 0.5, up


def ancestral(problem: Problem, sigma: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (down, keep, level): integrate to ``down``; keep · x + level · noise is then at ``target``."""
    if target == 0:  # also from 0
        return target, torch.ones_like(target), target
    if not problem.flow:
        down, up = ancestral_split(sigma, target)
        return down, torch.ones_like(up), up
    down = target * (1 + (target / sigma - 1))
    keep = (1 - target) / (1 - down)
    return down, keep, (target**2 - down**2 * (1 - target) ** 2 / (1 - down) ** 2) ** 0.5
