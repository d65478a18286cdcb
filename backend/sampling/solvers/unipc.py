"""UniPC: a predictor-corrector that needs one model call a step."""

from functools import partial

import torch
from torch import Tensor

from .problem import Problem, Steps, weighted

#: Where a schedule ends in sigma 0, UniPC goes to this level, as its half log SNR has to be finite.
LAST_SIGMA = 0.001
_ORDER = 3


def uni_pc(x: Tensor, problem: Problem, variant: str = "bh1") -> Steps:
    """Integrate by UniPC (arXiv 2302.04867) of order 3 with B(h) = h, in the variance-preserving scale."""
    times = problem.sigmas.clone()
    steps = len(problem.sigmas) - 1
    if times[-1] == 0:
        times[-1] = LAST_SIGMA
    alphas, stds, lambdas = _vp(times)
    x = x / torch.sqrt(1.0 + times[0] ** 2.0)
    order = min(_ORDER, steps - 1)
    data = [(yield from _data(x, times, alphas, stds, k=0))]
    # with one step ComfyUI's order is 0: it never leaves the first level, and so do we
    for k in range(1, steps + 1 if order else 0):
        used = k if k < order else min(order, steps + 1 - k)
        ratio = stds[k] / stds[k - 1]
        levels = lambdas[[k, *range(k - 1, k - 1 - used, -1)]]
        update = partial(_update, x, data[:used], alphas[k], ratio, levels, variant)
        if k == steps:
            x = update(None)
        else:
            newest = yield from _data(update(None), times, alphas, stds, k=k)
            x = update(newest)
            data = [newest, *data][:order]
    x = x / alphas[-1]
    # ComfyUI overwrites the schedule's 0 too, so that a flow model's latent is scaled back from LAST_SIGMA
    return x / (1.0 - times[-1]) if problem.flow and problem.sigmas[-1] == 0 else x


def uni_pc_bh2(x: Tensor, problem: Problem) -> Steps:
    """Integrate by UniPC with B(h) = exp(h) - 1."""
    return uni_pc(x, problem, "bh2")


def _vp(sigmas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (alpha, sigma, half log SNR) of the variance-preserving scale, with ComfyUI's rounding."""
    log_alpha = 0.5 * torch.log(1 / (sigmas * sigmas + 1))
    variance = 1.0 - torch.exp(2.0 * log_alpha)
    return torch.exp(log_alpha), torch.sqrt(variance), log_alpha - 0.5 * torch.log(variance)


def _data(x: Tensor, times: Tensor, alphas: Tensor, stds: Tensor, k: int) -> Steps:
    """Return the prediction at time k, by way of the noise that it means."""
    scaled = x * ((times[k] ** 2 + 1.0) ** 0.5)
    denoised = yield scaled, times[k], k
    return (x - stds[k] * ((scaled - denoised) / times[k])) / alphas[k]


def _update(
    x: Tensor,
    data: list[Tensor],
    alpha: Tensor,
    ratio: Tensor,
    lambdas: Tensor,
    variant: str,
    newest: Tensor | None,
) -> Tensor:
    """Return x one step on. data: earlier predictions, newest first; lambdas: at the target and at each of
    ``data``; ratio: of the noise levels. newest: the prediction at the target for the corrector, None for
    the predictor."""
    h = lambdas[0] - lambdas[1]
    x = ratio * x - alpha * torch.expm1(-h) * data[0]
    if newest is None and len(data) == 1:
        return x
    ratios = [(past - lambdas[1]) / h for past in lambdas[2:]]
    terms = [(past - data[0]) / r for past, r in zip(data[1:], ratios)]
    scale, matrix, target = _conditions(torch.stack([*ratios, torch.ones(())]), -h, variant)
    if newest is None:
        weights = torch.tensor([0.5]) if len(data) == 2 else torch.linalg.solve(matrix[:-1, :-1], target[:-1])
    else:
        terms.append(newest - data[0])
        weights = torch.tensor([0.5]) if len(data) == 1 else torch.linalg.solve(matrix, target)
    return x - alpha * scale * weighted(weights, terms)


def _conditions(ratios: Tensor, hh: Tensor, variant: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return B(h), and the linear system of the order conditions, one equation for each order."""
    scale = hh if variant == "bh1" else torch.expm1(hh)
    phi = torch.expm1(hh) / hh - 1
    factorial = 1
    rows = []
    target = []
    for k in range(1, len(ratios) + 1):
        rows.append(ratios ** (k - 1))
        target.append(phi * factorial / scale)
        factorial *= k + 1
        phi = phi / hh - 1 / factorial
    return scale, torch.stack(rows), torch.stack(target)
