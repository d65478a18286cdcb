"""DPM-Solver++ (Lu et al. 2022, arXiv 2211.01095): exponential integrators of the data prediction."""

from collections.abc import Callable

from torch import Tensor

from .problem import Problem, Steps, ancestral, ancestral_split, blend, euler_step


def dpmpp_2m(x: Tensor, problem: Problem) -> Steps:
    """Integrate by DPM-Solver++(2M), the second-order multistep solver."""
    old_denoised = h_last = None
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        t = sigma.log().neg()
        t_next = sigma_next.log().neg()
        h = t_next - t
        direction = denoised
        if old_denoised is not None and h_last is not None and sigma_next != 0:
            r = h_last / h
            direction = (1 + 1 / (2 * r)) * denoised - (1 / (2 * r)) * old_denoised
        x = (t_next.neg().exp() / t.neg().exp()) * x - (-h).expm1() * direction
        old_denoised = denoised
        h_last = h
    return x


def dpmpp_2s_ancestral(x: Tensor, problem: Problem) -> Steps:
    """Integrate by DPM-Solver++(2S), single step of order 2, with fresh noise; flow models in their form."""
    fresh = problem.draws()
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        down, keep, level = ancestral(problem, sigma, sigma_next)
        if down == 0:
            x = euler_step(x, denoised, sigma, down)
        else:
            middle = _middle(problem, sigma, down)
            denoised = yield blend(x, denoised, middle / sigma), middle, i
            x = blend(x, denoised, down / sigma)
        if sigma_next > 0:
            x = keep * x + level * fresh()
    return x


def _middle(problem: Problem, sigma: Tensor, down: Tensor) -> Tensor:
    if problem.flow and sigma == 1:
        return sigma.new_tensor(0.9999)  # half_log_snr is infinite at 1
    if problem.flow:
        t = ((1 - sigma) / sigma).log()
        t_down = ((1 - down) / down).log()
        return ((t + 0.5 * (t_down - t)).exp() + 1) ** -1
    t = sigma.log().neg()
    t_down = down.log().neg()
    return (t + 0.5 * (t_down - t)).neg().exp()


def dpmpp_sde(x: Tensor, problem: Problem) -> Steps:
    """Integrate by DPM-Solver++ of the SDE; the prediction midway in half log SNR takes the whole step."""
    problem = problem.with_finite_snr()
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        if sigma_next == 0:
            x = denoised
            continue
        start = problem.half_log_snr(sigma)
        end = problem.half_log_snr(sigma_next)
        half = start + 0.5 * (end - start)
        middle = problem.sigma_at(half)
        noise = problem.brownian(sigma, middle)
        x_middle = _sde_step(x, denoised, (sigma, start), (middle, half), noise)
        denoised = yield x_middle, middle, i
        x = _sde_step(x, denoised, (sigma, start), (sigma_next, end), problem.brownian(sigma, sigma_next))
    return x


def _sde_step(
    x: Tensor, denoised: Tensor, here: tuple[Tensor, Tensor], there: tuple[Tensor, Tensor], noise: Tensor
) -> Tensor:
    """Make an ancestral step between two (sigma, half log SNR), in sigma / alpha also for flow models."""
    (sigma, start), (target, end) = here, there
    alpha = sigma * start.exp()
    alpha_target = target * end.exp()
    down, up = ancestral_split(start.neg().exp(), end.neg().exp())
    h = down.log().neg() - start
    x = (alpha_target / alpha) * (-h).exp() * x - alpha_target * (-h).expm1() * denoised
    return x + alpha_target * noise * up


def _sde_multistep(x: Tensor, problem: Problem, higher_orders: Callable[..., Tensor]) -> Steps:
    """Step by the SDE's first order, and where there is a history by ``higher_orders``: (x, alpha at the
    target, prediction, h, (prediction, h) of up to two steps before, newest first) -> x."""
    problem = problem.with_finite_snr()
    history: list[tuple[Tensor, Tensor]] = []
    for i, sigma, sigma_next in problem.steps:
        denoised = yield x, sigma, i
        if sigma_next == 0:
            x = denoised
            continue
        h = problem.half_log_snr(sigma_next) - problem.half_log_snr(sigma)
        alpha = problem.alpha(sigma_next)
        x = sigma_next / sigma * (-h).exp() * x + alpha * (-2 * h).expm1().neg() * denoised
        if history:
            x = higher_orders(x, alpha, denoised, h, history)
        x = x + problem.brownian(sigma, sigma_next) * sigma_next * (-2 * h).expm1().neg().sqrt()
        history = [(denoised, h), *history[:1]]
    return x


def dpmpp_2m_sde(x: Tensor, problem: Problem) -> Steps:
    """Integrate by DPM-Solver++(2M) of the SDE, with the midpoint rule."""
    return _sde_multistep(x, problem, _midpoint)


def dpmpp_3m_sde(x: Tensor, problem: Problem) -> Steps:
    """Integrate by DPM-Solver++(3M) of the SDE (k-diffusion)."""
    return _sde_multistep(x, problem, _higher_orders)


def _midpoint(
    x: Tensor, alpha: Tensor, denoised: Tensor, h: Tensor, history: list[tuple[Tensor, Tensor]]
) -> Tensor:
    old_denoised, h_last = history[0]
    weight = 0.5 * alpha * (-2 * h).expm1().neg() * (1 / (h_last / h))
    return x + weight * (denoised - old_denoised)


def _higher_orders(
    x: Tensor, alpha: Tensor, denoised: Tensor, h: Tensor, history: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return x with the terms of the first derivative and, with two steps of history, the second one."""
    denoised_1, h_1 = history[0]
    h_eta = 2 * h
    phi_2 = h_eta.neg().expm1() / h_eta + 1
    d1_0 = (denoised - denoised_1) / (h_1 / h)
    if len(history) == 1:
        return x + (alpha * phi_2) * d1_0
    denoised_2, h_2 = history[1]
    r0 = h_1 / h
    r1 = h_2 / h
    d1_1 = (denoised_1 - denoised_2) / r1
    d1 = d1_0 + (d1_0 - d1_1) * r0 / (r0 + r1)
    d2 = (d1_0 - d1_1) / (r0 + r1)
    return x + (alpha * phi_2) * d1 - (alpha * (phi_2 / h_eta - 0.5)) * d2
