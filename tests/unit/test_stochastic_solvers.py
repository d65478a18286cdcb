"""Stochastic solvers without their noise, on a prediction that moves along the path.

What they approximate is an ordinary differential equation then. With the ideal model of normal data
(test_solvers.py) the mean of the prediction stays as it is, so that no term of a higher order shows there.
"""

import math
from dataclasses import dataclass

import pytest
import torch

from backend.protocol.solver_names import HALF_LOG_SNR
from backend.sampling.prediction import EPS, FLOW
from backend.sampling.solver_registry import SOLVER_FUNCTIONS, Problem

#: Solver -> how far it is off in STEPS steps, of flow models and of others.
ERRORS = {
    "dpmpp_sde": (1.211e-3, 1.209e-3),
    "dpmpp_2m_sde": (1.497e-3, 1.022e-4),
    "dpmpp_3m_sde": (8.895e-4, 4.199e-4),
    "seeds_2": (1.211e-3, 1.209e-3),
    "seeds_3": (2.118e-5, 4.770e-6),
    "sa_solver": (7.884e-5, 3.204e-5),
    "er_sde": (7.210e-4, 1.323e-3),
}
STEPS = 32
#: x over the factor of the data in it, at the first noise level.
START = 1.5
#: Steps of the reference, of fourth order: its own error is below 1e-10.
FINE = 1000


def prediction_of(data: float, half_log_snr: float) -> float:
    """The model: of x over the factor of the data in it."""
    return math.sin(half_log_snr) + data / 4


def decay(half_log_snr: float, is_extended: bool) -> float:
    """How fast the reverse SDE's mean forgets x: with the noise that it usually has, or with ER-SDE's."""
    if not is_extended:
        return 2.0
    power = math.exp(-0.3 * half_log_snr)
    return 1 + 0.3 * power * math.exp(power) / (math.exp(power) + 10)


@dataclass(frozen=True)
class Path:
    """The way of x from START through the noise levels of ``problem``."""

    problem: Problem

    def solved(self, solver: str) -> float:
        problem = self.problem
        x = START * problem.alpha(problem.sigmas[0])
        steps = SOLVER_FUNCTIONS[solver](x.reshape(1), problem)
        request = next(steps)
        while True:
            x, sigma, _ = request
            data = (x / problem.alpha(sigma)).item()
            try:
                request = steps.send(x * 0 + prediction_of(data, problem.half_log_snr(sigma).item()))
            except StopIteration as end:
                return end.value.item()

    def exact(self, is_extended: bool) -> float:
        """By Runge and Kutta, in the half log SNR."""
        problem = self.problem
        start, end = (problem.half_log_snr(problem.sigmas[i]).item() for i in (0, -1))
        step = (end - start) / FINE

        def slope(at: float, data: float) -> float:
            return decay(at, is_extended) * (prediction_of(data, at) - data)

        data = START
        for index in range(FINE):
            at = start + index * step
            first = slope(at, data)
            second = slope(at + step / 2, data + step / 2 * first)
            third = slope(at + step / 2, data + step / 2 * second)
            fourth = slope(at + step, data + step * third)
            data += step / 6 * (first + 2 * second + 2 * third + fourth)
        return data * problem.alpha(problem.sigmas[-1]).item()


def path(prediction) -> Path:
    sigmas = torch.linspace(0.8, 0.2, STEPS + 1, dtype=torch.float64)
    if prediction is EPS:
        sigmas = torch.logspace(0.5, -0.5, STEPS + 1, dtype=torch.float64)
    nothing = torch.zeros(1, dtype=torch.float64)
    # SA-Solver adds noise between two of these levels: at all of them
    levels = {True: float("inf"), False: 0.0}
    problem = Problem(
        sigmas,
        prediction,
        noise=lambda index: nothing,
        brownian=lambda sigma, target: nothing,
        percent_to_sigma=lambda percent: levels[percent < 0.5],
    )
    return Path(problem)


@pytest.mark.parametrize("solver", sorted(HALF_LOG_SNR))
@pytest.mark.parametrize("kind", (0, 1), ids=("flow", "eps"))
def test_a_prediction_that_moves_is_integrated(solver, kind):
    """A wrong term of any order makes the error another one, as a wrong sign of the last one of 3M does."""
    way = path((FLOW, EPS)[kind])
    error = abs(way.solved(solver) - way.exact(solver == "er_sde"))
    assert error == pytest.approx(ERRORS[solver][kind], rel=0.05)
