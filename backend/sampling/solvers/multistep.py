"""Linear multistep methods: the slopes of earlier steps instead of more model calls."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from .problem import Problem, Steps, euler_step, weighted

#: Points of the Riemann sum of DEIS' weights.
DEIS_POINTS = 10000
#: The paper's gamma of gradient_estimation; ComfyUI's default.
GAMMA = 2.0


def _by_slopes(x: Tensor, problem: Problem, change: Callable[[int, list[Tensor]], Tensor]) -> Steps:
    """Step by ``change``: (step, slopes of up to four steps, newest first) -> what is added to x."""
    slopes: list[Tensor] = []
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        slopes = [(x - denoised) / sigma, *slopes[:3]]
        x = denoised if sigma_next == 0 else x + change(i, slopes)
    return x


def lms(x: Tensor, problem: Problem) -> Steps:
    """Integrate by Adams-Bashforth of order 4 in sigma, for uneven steps (k-diffusion)."""
    times = problem.sigmas.tolist()

    def change(i, slopes):
        knots = times[i - len(slopes) + 1 : i + 1][::-1]
        weights = [_lagrange_integral(knots, j, start=times[i], end=times[i + 1]) for j in range(len(slopes))]
        return weighted(weights, slopes)

    return _by_slopes(x, problem, change)


def _lagrange_integral(knots: list[float], j: int, start: float, end: float) -> float:
    """Return the integral of the Lagrange polynomial of knot j; two Gauss points are exact up to degree 3."""
    half = (end - start) / 2
    centre = (end + start) / 2
    points = (centre - half / math.sqrt(3), centre + half / math.sqrt(3))
    return half * sum(
        math.prod((p - k) / (knots[j] - k) for m, k in enumerate(knots) if m != j) for p in points
    )


#: Adams-Bashforth for equal steps: the weights, newest slope first, and what they are divided by.
_EQUAL_STEPS = (((1,), 1), ((3, -1), 2), ((23, -16, 5), 12), ((55, -59, 37, -9), 24))


def ipndm(x: Tensor, problem: Problem) -> Steps:
    """Integrate by improved PNDM (arXiv 2204.13902): Adams-Bashforth of order 4, as if steps were equal."""
    sigmas = problem.sigmas

    def change(i, slopes):
        weights, divisor = _EQUAL_STEPS[len(slopes) - 1]
        return (sigmas[i + 1] - sigmas[i]) * weighted(weights, slopes) / divisor

    return _by_slopes(x, problem, change)


def ipndm_v(x: Tensor, problem: Problem) -> Steps:
    """Integrate by improved PNDM with the weights of uneven steps (diff-sampler, as ComfyUI has it)."""
    sigmas = problem.sigmas

    def change(i, slopes):
        lengths = sigmas[i - len(slopes) + 1 : i + 2].diff().flip(0)
        return (sigmas[i + 1] - sigmas[i]) * weighted(_uneven_steps(*lengths), slopes)

    return _by_slopes(x, problem, change)


def _uneven_steps(h: Tensor, h1=None, h2=None, h3=None) -> tuple:
    """Return the weights of the slopes, newest first, from the lengths of this step and of those before it.

    ``second`` is where diff-sampler and ComfyUI divide before they subtract, which is Adams-Bashforth for
    equal steps only. It stays, since it decides the image.
    """
    if h1 is None:
        return (1.0,)
    ratio = h / h1
    first = ((2 + ratio) / 2, -ratio / 2)
    if h2 is None:
        return first
    second = (1 - h / (3 * (h + h1)) * (h * (h + h1)) / (h1 * (h1 + h2))) / 2
    if h3 is None:
        return first[0] + second, first[1] - (1 + h1 / h2) * second, second * h1 / h2
    third = (
        ((1 - h / (3 * (h + h1))) / 2 + (1 - h / (2 * (h + h1))) * h / (6 * (h + h1 + h2)))
        * (h * (h + h1) * (h + h1 + h2))
        / (h1 * (h1 + h2) * (h1 + h2 + h3))
    )
    share = h1 * (h1 + h2) / (h2 * (h2 + h3))
    return (
        first[0] + second + third,
        first[1] - (1 + h1 / h2) * second - (1 + h1 / h2 + share) * third,
        second * h1 / h2 + (h1 / h2 + share * (1 + h2 / h3)) * third,
        -third * share * h1 / h2,
    )


def deis(x: Tensor, problem: Problem) -> Steps:
    """Integrate by DEIS (Zhang & Chen 2022, arXiv 2204.13902): tAB of order 3, in a linear VP-SDE's time."""
    weights = _deis_weights(tuple(problem.sigmas.tolist()))
    slopes: list[Tensor] = []
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        slopes = [(x - denoised) / sigma, *slopes[:2]]
        if i == 0 or sigma_next <= 0:
            x = euler_step(x, denoised, sigma, sigma_next)
            continue
        for weight, slope in zip(weights[i], slopes):
            x = x + weight * slope
    return x


def _vp_time(sigmas: Tensor) -> tuple[Tensor, float, float]:
    """Return (times, beta at 0, beta at 1) of the linear VP-SDE from level 0.002 at time 1e-3 to 80 at 1."""
    log_start = torch.tensor(0.002).square().add(1).log().item()
    log_end = math.log(80**2 + 1)
    rise = 2 * (log_start / 1e-3 - log_end) / (1e-3 - 1)
    beta_0 = log_end - 0.5 * rise
    times = ((beta_0**2 + 2 * rise * (sigmas**2 + 1).log()).sqrt() - beta_0) / rise
    return times, beta_0, rise + beta_0


@lru_cache(maxsize=4)
def _deis_weights(sigmas: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return the weights of each step's slopes, newest first, by a Riemann sum in float32 as in ComfyUI."""
    times, beta_0, beta_1 = _vp_time(torch.tensor(sigmas))
    weights: list[tuple[float, ...]] = [()]
    for i in range(1, len(times) - 1):
        tau = torch.linspace(times[i], times[i + 1], DEIS_POINTS)
        alpha = torch.exp(-0.5 * tau**2 * (beta_1 - beta_0) - tau * beta_0)
        # the rounding of the chain rule, with which ComfyUI differentiates log(alpha)
        unit = 1 / alpha * alpha
        rate = unit * (beta_1 - beta_0) * -0.5 * (2 * tau) - unit * beta_0
        speed = -0.5 * rate / torch.sqrt(alpha * (1 - alpha))
        knots = times[max(i - 2, 0) : i + 1].flip(0)
        width = (times[i + 1] - times[i]) / DEIS_POINTS
        integrals = [torch.sum(speed * _lagrange(knots, j, tau)) * width for j in range(len(knots))]
        weights.append(tuple(integral.item() for integral in integrals))
    return weights


def _lagrange(knots: Tensor, j: int, at: Tensor) -> Tensor:
    product = torch.ones_like(at)
    for k in range(len(knots)):
        if k != j:
            product = product * ((at - knots[k]) / (knots[j] - knots[k]))
    return product


def res_multistep(x: Tensor, problem: Problem) -> Steps:
    """Integrate by RES (arXiv 2308.02157): exponential multistep of order 2 with refined coefficients."""
    old_denoised = t_last = None
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        t = sigma.log().neg()
        if sigma_next == 0 or old_denoised is None or t_last is None:
            x = euler_step(x, denoised, sigma, sigma_next)
        else:
            h = sigma_next.log().neg() - t
            phi_1 = torch.expm1(-h) / -h
            phi_2 = (phi_1 - 1.0) / -h
            share = torch.nan_to_num(phi_2 / ((t_last - t) / h), nan=0.0)
            own = torch.nan_to_num(phi_1 - share, nan=0.0)
            x = h.neg().exp() * x + h * (own * denoised + share * old_denoised)
        old_denoised = denoised
        t_last = t
    return x


def gradient_estimation(x: Tensor, problem: Problem) -> Steps:
    """Integrate by gradient estimation (arXiv 2306.04848): Euler with the slope's change added again."""
    old_slope = None
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        slope = (x - denoised) / sigma
        dt = sigma_next - sigma
        if sigma_next == 0:
            x = denoised
        else:
            x = x + slope * dt
            if old_slope is not None:
                x = x + (GAMMA - 1) * (slope - old_slope) * dt
        old_slope = slope
    return x
