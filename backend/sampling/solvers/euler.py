"""Euler, Heun and DPM-Solver-2 steps, their ancestral forms, and the solvers that renoise a prediction."""

from collections.abc import Callable

import torch
from torch import Tensor

from .problem import Problem, Steps, ancestral, ancestral_split, blend, euler_step


def euler(x: Tensor, problem: Problem) -> Steps:
    """Integrate by Euler steps (Karras et al. 2022, arXiv 2206.00364, algorithm 2 without churn)."""
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        x = euler_step(x, denoised, sigma, sigma_next)
    return x


def euler_ancestral(x: Tensor, problem: Problem) -> Steps:
    """Integrate by Euler steps with fresh noise (k-diffusion); flow models in the rectified-flow form."""
    fresh = problem.draws()
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        down, keep, level = ancestral(problem, sigma, sigma_next)
        if down == 0:
            x = denoised
            continue
        x = blend(x, denoised, down / sigma) if problem.flow else euler_step(x, denoised, sigma, down)
        x = keep * x + level * fresh()
    return x


def euler_cfg_pp(x: Tensor, problem: Problem, fresh: Callable[[], Tensor] | None = None) -> Steps:
    """Integrate by CFG++ (arXiv 2406.08070): guided data, renoised as the negative prompt predicts; with
    ``fresh`` noise as ancestral steps have it."""
    for i, sigma, sigma_next in problem.steps:
        denoised, negative = yield x, sigma, i
        if sigma_next == 0:
            x = denoised
            continue
        alpha = problem.alpha(sigma)
        alpha_next = problem.alpha(sigma_next)
        noise = (x - alpha * negative) / sigma
        level = sigma_next / alpha_next
        # from a flow's sigma of 1, whose alpha is 0, all noise is fresh
        down, up = ancestral_split(sigma / alpha, level) if fresh else (level, torch.zeros_like(level))
        x = alpha_next * denoised + alpha_next * down * noise
        if fresh:
            x = x + alpha_next * fresh() * up
    return x


def euler_ancestral_cfg_pp(x: Tensor, problem: Problem) -> Steps:
    """Integrate by CFG++ with part of the noise fresh (ComfyUI)."""
    return euler_cfg_pp(x, problem, problem.draws())


def heun(x: Tensor, problem: Problem) -> Steps:
    """Integrate by Heun steps (Karras et al. 2022, algorithm 2 without churn); Euler into sigma 0."""
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        slope = (x - denoised) / sigma
        dt = sigma_next - sigma
        x_next = x + slope * dt
        if sigma_next != 0:
            denoised = yield x_next, sigma_next, i
            x_next = x + (slope + (x_next - denoised) / sigma_next) / 2 * dt
        x = x_next
    return x


def dpm_2(x: Tensor, problem: Problem, fresh: Callable[[], Tensor] | None = None) -> Steps:
    """Integrate by DPM-Solver-2 (arXiv 2206.00927, k-diffusion): the slope at the logarithmic midpoint; with
    ``fresh`` noise flow models in the rectified-flow form."""
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        down = sigma_next
        if fresh:
            down, keep, level = ancestral(problem, sigma, sigma_next)
        if down == 0:
            x = euler_step(x, denoised, sigma, down)
            continue
        middle = sigma.log().lerp(down.log(), 0.5).exp()
        x_middle = euler_step(x, denoised, sigma, middle)
        denoised = yield x_middle, middle, i
        x = x + (x_middle - denoised) / middle * (down - sigma)
        if fresh:
            x = keep * x + level * fresh()
    return x


def dpm_2_ancestral(x: Tensor, problem: Problem) -> Steps:
    """Integrate by DPM-Solver-2 with fresh noise (k-diffusion)."""
    return dpm_2(x, problem, problem.draws())


def lcm(x: Tensor, problem: Problem) -> Steps:
    """Sample by latent consistency (arXiv 2310.04378): take the prediction, add noise of the next level."""
    fresh = problem.draws()
    for i, sigma, sigma_next in problem.steps:
        x = yield x, sigma, i
        if sigma_next > 0:
            x = problem.prediction.add_noise(sigma_next, fresh(), x, False)
    return x


def ddpm(x: Tensor, problem: Problem) -> Steps:
    """Step by DDPM's posterior mean and variance (arXiv 2006.11239), in its variance-preserving scale."""
    fresh = problem.draws()
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        noise = (x - denoised) / sigma
        signal = 1 / (sigma * sigma + 1)
        signal_next = 1 / (sigma_next * sigma_next + 1)
        alpha = signal / signal_next
        x = x / torch.sqrt(1.0 + sigma**2.0) - (1 - alpha) * noise / (1 - signal).sqrt()
        x = (1.0 / alpha).sqrt() * x
        if sigma_next > 0:
            x = x + ((1 - alpha) * (1.0 - signal_next) / (1.0 - signal)).sqrt() * fresh()
            x = x * torch.sqrt(1.0 + sigma_next**2.0)
    return x
