"""Solvers as generators, written once for every parallel mode.

A solver yields ``(x, sigma, step)`` where it needs the model, is sent the denoised prediction, and returns the final x. The maths is
elementwise, so one generator per PipeFusion patch steps that patch's rows with its own history, and the same lines serve one process.
Formulas are k-diffusion's as ComfyUI has them (comfy/k_diffusion/sampling.py), so that the same seed gives the same latent.
"""

from dataclasses import dataclass
from typing import Callable, Generator, Iterator

import torch

from .prediction import FLOW, Prediction
from .solver_names import SOLVERS

Tensor = torch.Tensor
Steps = Generator[tuple[Tensor, Tensor, int], Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """What a solver integrates.

    sigmas: (steps + 1,), descending. ``noise(k)`` is the k-th fresh Gaussian draw of the request, in the shape of the solver's x; draws
    belong to the whole latent, so they do not depend on patches or ranks.
    """

    sigmas: Tensor
    prediction: Prediction
    noise: Callable[[int], Tensor]

    @property
    def steps(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(index, sigma, next sigma) of every step."""
        return ((i, self.sigmas[i], self.sigmas[i + 1]) for i in range(len(self.sigmas) - 1))


def euler(x: Tensor, problem: Problem) -> Steps:
    """Euler steps (Karras et al. 2022, algorithm 2 without churn)."""
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        x = x + (x - denoised) / sigma * (sigma_next - sigma)
    return x


def euler_ancestral(x: Tensor, problem: Problem) -> Steps:
    """Euler steps with fresh noise; for flow models the rectified-flow form of it."""
    step = _ancestral_flow if problem.prediction is FLOW else _ancestral
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        x = denoised if sigma_next == 0 else step(x, denoised, sigma, sigma_next, problem.noise(i))
    return x


def _ancestral_flow(x, denoised, sigma, sigma_next, noise):
    sigma_down = sigma_next * (1 + (sigma_next / sigma - 1))
    alpha_next, alpha_down = 1 - sigma_next, 1 - sigma_down
    renoise = (sigma_next**2 - sigma_down**2 * alpha_next**2 / alpha_down**2) ** 0.5
    ratio = sigma_down / sigma
    return (alpha_next / alpha_down) * (ratio * x + (1 - ratio) * denoised) + noise * renoise


def _ancestral(x, denoised, sigma, sigma_next, noise):
    sigma_up = torch.minimum(sigma_next, (sigma_next**2 * (sigma**2 - sigma_next**2) / sigma**2) ** 0.5)
    sigma_down = (sigma_next**2 - sigma_up**2) ** 0.5
    if sigma_down == 0:
        return denoised
    return x + (x - denoised) / sigma * (sigma_down - sigma) + noise * sigma_up


def heun(x: Tensor, problem: Problem) -> Steps:
    """Heun's second-order steps (Karras et al. 2022, algorithm 2 without churn); Euler into sigma 0."""
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        slope, dt = (x - denoised) / sigma, sigma_next - sigma
        if sigma_next == 0:
            x = x + slope * dt
            continue
        x_2 = x + slope * dt
        denoised_2 = yield x_2, sigma_next, i
        slope_2 = (x_2 - denoised_2) / sigma_next
        x = x + (slope + slope_2) / 2 * dt
    return x


def dpmpp_2m(x: Tensor, problem: Problem) -> Steps:
    """DPM-Solver++(2M), the second-order multistep solver of Lu et al. 2022 (arXiv 2211.01095)."""
    old_denoised = h_last = None
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        t, t_next = sigma.log().neg(), sigma_next.log().neg()
        h = t_next - t
        direction = denoised
        if old_denoised is not None and sigma_next != 0:
            r = h_last / h
            direction = (1 + 1 / (2 * r)) * denoised - (1 / (2 * r)) * old_denoised
        x = (t_next.neg().exp() / t.neg().exp()) * x - (-h).expm1() * direction
        old_denoised, h_last = denoised, h
    return x


def lcm(x: Tensor, problem: Problem) -> Steps:
    """Latent consistency sampling (Luo et al. 2023): jump to the prediction, add noise of the next level."""
    for i, sigma, sigma_next in problem.steps:
        x = yield x, sigma, i
        if sigma_next > 0:
            x = problem.prediction.add_noise(sigma_next, problem.noise(i), x, False)
    return x


#: ddim is ComfyUI's: Euler steps, and its own noise where a mask keeps part of the latent (see engine.inpaint_noise).
_FUNCTIONS = {"ddim": euler}
SOLVER_FUNCTIONS = {name: _FUNCTIONS.get(name) or globals()[name] for name in SOLVERS}


@dataclass(frozen=True)
class Evaluation:
    """One call of the model: at which noise level, in which step of the schedule."""

    sigma: Tensor
    step: int


def evaluations(solver: str, problem: Problem) -> list[Evaluation]:
    """Every model call that ``solver`` will make, in order, known before the first: stages that hold no latent follow this list."""
    zero = torch.zeros(())
    dry = SOLVER_FUNCTIONS[solver](zero, Problem(problem.sigmas.cpu(), problem.prediction, lambda k: zero))
    plan, request = [], next(dry, None)
    while request is not None:
        plan.append(Evaluation(request[1], request[2]))
        try:
            request = dry.send(zero)
        except StopIteration:
            request = None
    return plan
