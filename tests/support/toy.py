"""Solvers on a model that is a formula, with the noise of a request: no transformer, no ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.models.latent_tokens import TokenGrid
from backend.parallel.sequence import Span
from backend.sampling.noise import FreshNoise
from backend.sampling.prediction import Prediction
from backend.sampling.solver_registry import SOLVER_FUNCTIONS, Problem, solver_input

GRID = TokenGrid((4, 8, 6), (1, 2, 2))
BATCH = 2


@dataclass(frozen=True)
class Toy:
    """positive, negative: (model input, sigma) -> model output, elementwise."""

    prediction: Prediction
    positive: Callable[[Tensor, Tensor], Tensor]
    negative: Callable[[Tensor, Tensor], Tensor]
    percent_to_sigma: Callable[[float], float]
    cfg: float = 1.5

    def denoised(self, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """(guided, negative) predictions of the data."""
        scaled = self.prediction.model_input(x, sigma)
        positive, negative = (
            self.prediction.denoised(x, sigma, model(scaled, sigma))
            for model in (self.positive, self.negative)
        )
        return negative + (positive - negative) * self.cfg, negative


def fresh_noise(seed: int, sigmas: Tensor) -> FreshNoise:
    return FreshNoise(seed, BATCH, GRID, torch.device("cpu"), sigmas)


def problem(toy: Toy, sigmas: Tensor, noise: FreshNoise, rows: slice = slice(None)) -> Problem:
    return Problem(
        sigmas,
        toy.prediction,
        lambda k: noise.draw(k)[:, rows],
        lambda a, b: noise.brownian(a, b)[:, rows],
        toy.percent_to_sigma,
    )


def solve(
    solver: str, toy: Toy, x: Tensor, sigmas: Tensor, noise: FreshNoise, inpaint=None, log: list | None = None
) -> Tensor:
    """The solver's answer for the tokens x (B, N, F). inpaint: a request.Inpaint; ``log`` gets (sigma, step)
    of every model call.
    """
    steps, span = SOLVER_FUNCTIONS[solver](x, problem(toy, sigmas, noise)), Span(0, x.shape[1])
    request = next(steps)
    while True:
        x, sigma, step = request
        if log is not None:
            log.append((sigma.item(), step))
        denoised, negative = toy.denoised(inpaint.model_input(x, sigma, span) if inpaint else x, sigma)
        try:
            request = steps.send(
                solver_input(solver, inpaint.denoised(denoised, span) if inpaint else denoised, negative)
            )
        except StopIteration as end:
            return end.value
