"""Stochastic exponential integrators in the half log SNR: ER-SDE, SEEDS and SA-Solver."""

import math

import torch
from torch import Tensor

from ...protocol.solver_names import STOCHASTIC_PERCENTS
from .problem import Problem, Steps, weighted

#: Points of the Riemann sum of ER-SDE's weights.
ER_POINTS = 200


def _er_scale(level: Tensor) -> Tensor:
    """Return the noise that ER-SDE replaces at a noise-to-signal ratio (the authors' fifth choice)."""
    return level * ((level**0.3).exp() + 10.0)


def er_sde(x: Tensor, problem: Problem) -> Steps:
    """Integrate by ER-SDE-Solver-3 (Cui et al. 2023, arXiv 2309.06169): the extended reverse-time SDE."""
    problem, fresh = problem.with_finite_snr(), problem.draws()
    levels = problem.half_log_snr(problem.sigmas).neg().exp()
    old_denoised = old_first = None
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        if sigma_next == 0:
            x = denoised
            continue
        level = levels[i]
        level_next = levels[i + 1]
        alpha = sigma / level
        alpha_next = sigma_next / level_next
        keep = _er_scale(level_next) / _er_scale(level)
        first_weight, second_weight = _er_weights(level, level_next)
        x = alpha_next / alpha * keep * x + alpha_next * (1 - keep) * denoised
        if i >= 1:
            first = (denoised - old_denoised) / (level - levels[i - 1])
            x = x + alpha_next * first_weight * first
            if i >= 2:
                second = (first - old_first) / ((level - levels[i - 2]) / 2)
                x = x + alpha_next * second_weight * second
            old_first = first
        x = x + alpha_next * fresh() * (level_next**2 - level**2 * keep**2).sqrt().nan_to_num(nan=0.0)
        old_denoised = denoised
    return x


def _er_weights(level: Tensor, level_next: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the prediction's first and second derivative, by a Riemann sum."""
    dt = level_next - level
    width = -dt / ER_POINTS
    at = level_next + torch.arange(ER_POINTS, dtype=torch.float32) * width
    scale = _er_scale(at)
    end = _er_scale(level_next)
    return dt + torch.sum(1 / scale) * width * end, dt**2 / 2 + torch.sum((at - level) / scale) * width * end


class _SeedsNoise:
    """SEEDS' noise along one step: each stage has that of the stages before it, decayed, and adds its own."""

    def __init__(self, h: Tensor, fresh):
        self.h = h
        self.fresh = fresh
        self.sum = 0.0
        self.at = 0.0

    def up_to(self, fraction: float) -> Tensor:
        """Return the noise up to a ``fraction`` of the step, to be scaled by the sigma there."""
        decay = (self.at - fraction) * self.h
        self.sum = self.sum * decay.exp() + decay.mul(2).expm1().neg().sqrt() * self.fresh()
        self.at = fraction
        return self.sum


def _phi_2(h: Tensor) -> Tensor:
    """Return h · phi_2(h) of exponential integrators."""
    return (torch.expm1(h) - h) / h


def _seeds_points(problem: Problem, sigma: Tensor, sigma_next: Tensor, fractions: tuple[float, ...]) -> tuple:
    """Return (h, sigmas, alphas) at fractions of the step h in half log SNR, and at its end."""
    start = problem.half_log_snr(sigma)
    end = problem.half_log_snr(sigma_next)
    lambdas = [*(torch.lerp(start, end, fraction) for fraction in fractions), end]
    sigmas = [*map(problem.sigma_at, lambdas[:-1]), sigma_next]
    return end - start, sigmas, [s * log_alpha.exp() for s, log_alpha in zip(sigmas, lambdas)]


def _scaled(x: Tensor, sigma: Tensor, sigma_next: Tensor, h: Tensor) -> Tensor:
    """Return what a SEEDS stage keeps of x at noise level ``sigma``, ``h`` further in half log SNR."""
    return sigma_next / sigma * (-h).exp() * x


def seeds_2(x: Tensor, problem: Problem) -> Steps:
    """Integrate by SEEDS-2 (arXiv 2305.14267): the half step's prediction takes the whole step (phi_1)."""
    problem, fresh = problem.with_finite_snr(), problem.draws()
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        if sigma_next == 0:
            x = denoised
            continue
        h, sigmas, alphas = _seeds_points(problem, sigma, sigma_next, (0.5,))
        noise = _SeedsNoise(h, fresh)
        middle = _scaled(x, sigma, sigmas[0], 0.5 * h) - alphas[0] * torch.expm1(-h) * denoised
        middle = middle + noise.up_to(0.5) * sigmas[0]
        denoised = yield middle, sigmas[0], i
        x = _scaled(x, sigma, sigma_next, h) - alphas[1] * torch.expm1(-2 * h) * denoised
        x = x + noise.up_to(1.0) * sigma_next
    return x


def seeds_3(x: Tensor, problem: Problem) -> Steps:
    """Integrate by SEEDS-3 (Gonzalez et al. 2023, arXiv 2305.14267): stages at 1/3 and 2/3 of the step."""
    problem, fresh = problem.with_finite_snr(), problem.draws()
    r_1 = 1 / 3
    r_2 = 2 / 3
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        if sigma_next == 0:
            x = denoised
            continue
        h, sigmas, alphas = _seeds_points(problem, sigma, sigma_next, (r_1, r_2))
        noise = _SeedsNoise(h, fresh)
        x_1 = _scaled(x, sigma, sigmas[0], r_1 * h) - alphas[0] * torch.expm1(-2 * r_1 * h) * denoised
        x_1 = x_1 + noise.up_to(r_1) * sigmas[0]
        denoised_1 = yield x_1, sigmas[0], i
        newer = r_2 / r_1 * _phi_2(-2 * r_2 * h)
        older = torch.expm1(-2 * r_2 * h) - newer
        x_2 = _scaled(x, sigma, sigmas[1], r_2 * h) - alphas[1] * (older * denoised + newer * denoised_1)
        x_2 = x_2 + noise.up_to(r_2) * sigmas[1]
        denoised_2 = yield x_2, sigmas[1], i
        newer = _phi_2(-2 * h) / r_2
        older = torch.expm1(-2 * h) - newer
        x = _scaled(x, sigma, sigmas[2], h) - alphas[2] * (older * denoised + newer * denoised_2)
        x = x + noise.up_to(1.0) * sigma_next
    return x


_PREDICTOR_ORDER, _CORRECTOR_ORDER = 3, 4


def sa_solver(x: Tensor, problem: Problem) -> Steps:
    """Integrate by SA-Solver (arXiv 2309.05019): stochastic Adams, predictor order 3, corrector order 4."""
    problem, fresh = problem.with_finite_snr(), problem.draws()
    sigmas = problem.sigmas
    lambdas = problem.half_log_snr(problem.sigmas)
    upper, lower = (problem.percent_to_sigma(percent) for percent in STOCHASTIC_PERCENTS)
    to_zero = sigmas[-1] == 0
    steps = len(sigmas) - 1
    predicted = x
    history = []
    tau = 0.0
    noise = None
    for i, sigma, sigma_next in problem.steps:
        denoised = yield predicted, sigma, i
        history = [*history, denoised][-_CORRECTOR_ORDER:]
        # lower orders towards sigma 0, for stability
        predictor = min(_PREDICTOR_ORDER, len(history), steps - 1 - i if to_zero else steps)
        corrector = min(_CORRECTOR_ORDER, len(history), steps - i if to_zero else steps)
        if i == 0 or sigma_next == 0:
            x = predicted
        else:
            x = _adams(x, lambdas, sigmas, i - 1, tau, history, lambdas[i - corrector + 1 : i + 1])
            x = x if noise is None else x + noise
        if sigma_next == 0:
            predicted = denoised
            continue
        tau = float(upper >= sigma_next.item() >= lower)
        predicted = _adams(x, lambdas, sigmas, i, tau, history, lambdas[i - predictor + 1 : i + 1])
        noise = None
        if tau:
            h = lambdas[i + 1] - lambdas[i]
            noise = fresh() * sigma_next * (-2 * tau**2 * h).expm1().neg().sqrt()
            predicted = predicted + noise
    return predicted


def _adams(x, lambdas, sigmas, i, tau, history, knots) -> Tensor:
    """Take step i by the polynomial through the newest predictions, at the half log SNRs ``knots``."""
    start = lambdas[i]
    end = lambdas[i + 1]
    weights = sigmas[i + 1] * end.exp() * _adams_weights(knots, start, end, tau)
    x = sigmas[i + 1] / sigmas[i] * (-(tau**2) * (end - start)).exp() * x
    return x + weighted(weights, history[-len(knots) :])


def _adams_weights(knots: Tensor, start: Tensor, end: Tensor, tau: float) -> Tensor:
    """Integrate (1 + tau²) · exp((1 + tau²)(s − end)) · L_j(s) over the step; L_j: Lagrange, of ``knots``."""
    rate = 1 + tau**2
    order = len(knots)
    powers = torch.arange(order, dtype=knots.dtype)
    # the moments (L_j -> s^p) by repeated integration by parts; log-gamma, for ComfyUI's rounding
    edges = end**powers - start**powers * (-rate * (end - start)).exp()
    depth = powers[:, None] - powers[None, :]
    log_factorial = (powers + 1).lgamma()
    recursion = log_factorial[:, None] - log_factorial[None, :]
    if tau:
        recursion = recursion - depth * math.log(rate)
    signs = torch.where(depth % 2 == 0, 1.0, -1.0)
    moments = (recursion.exp() * signs).tril() @ edges
    return torch.linalg.solve(torch.vander(knots, order, increasing=True).T, moments)
