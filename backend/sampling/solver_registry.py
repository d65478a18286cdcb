"""The solvers by name, and the list of model calls that one makes. The solvers themselves are in solvers/."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from ..protocol.solver_names import HALF_LOG_SNR, NEEDS_NEGATIVE, SOLVERS
from .solvers import dpmpp, euler, exponential, multistep, unipc
from .solvers.problem import Problem

#: A dry run from |x| < 1 that exceeds this has divided by ~0.
MAX_DRY_RUN = 1e6

_FUNCTIONS = vars(euler) | vars(dpmpp) | vars(multistep) | vars(exponential) | vars(unipc)
#: ComfyUI's ddim is Euler steps, and noise of its own where a mask keeps part of the latent (Inpaint).
_FUNCTIONS["ddim"] = euler.euler
SOLVER_FUNCTIONS = {name: _FUNCTIONS[name] for name in SOLVERS}


@dataclass(frozen=True)
class Evaluation:
    """One call of the model: at which noise level, in which step of the schedule."""

    sigma: Tensor
    step: int


def solver_input(solver: str, denoised: Tensor, negative: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Return what ``solver`` is sent: the prediction, or a pair with uncond's (before guidance and mask)."""
    return (denoised, negative) if solver in NEEDS_NEGATIVE else denoised


def needs_percent_sigmas(solver: str, flow: bool, first_sigma: float) -> bool:
    """Return whether the solver asks for noise levels outside the schedule (Problem.percent_to_sigma)."""
    return solver == "sa_solver" or (solver in HALF_LOG_SNR and flow and first_sigma >= 1)


def evaluations(solver: str, problem: Problem) -> list[Evaluation]:
    """List every model call of ``solver`` in order; stages that hold no latent follow this list."""
    return [Evaluation(sigma, step) for _, sigma, step in _dry(solver, problem, (0.0,))]


def is_finite(solver: str, problem: Problem) -> bool:
    """Return whether ``solver`` gets through the schedule, and back to the scale of images, without dividing
    by zero. Its factors follow from the noise levels alone, so a dry run over one number shows it."""
    run = _dry(solver, problem, (0.3, 0.7, 0.4))
    try:
        while next(run)[0].abs() < MAX_DRY_RUN:
            pass
        return False
    except StopIteration as end:
        return bool(problem.prediction.finish(end.value, problem.sigmas[-1]).abs() < MAX_DRY_RUN)
    # LinAlgError is documented, though torch.linalg does not list it among its exports
    except (ZeroDivisionError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
        return False


def _dry(
    solver: str, problem: Problem, numbers: tuple[float, ...]
) -> Generator[tuple[Tensor, Tensor, int], None, Tensor]:
    """Yield what ``solver`` asks for over the first of ``numbers``, all of which the model predicts in turn
    (NaN from NaN); return its final x."""
    values = [torch.tensor(number) for number in numbers]
    x = values[0]

    def brownian(a, b):
        return x * (a - b) / (a - b)  # as FreshNoise's, none from a noise level to itself

    dry = replace(problem, sigmas=problem.sigmas.cpu(), noise=lambda k: x, brownian=brownian)
    steps = SOLVER_FUNCTIONS[solver](x, dry)
    try:
        request = next(steps)
        for denoised in cycle(values):
            yield request
            denoised = denoised + 0 * request[0]
            request = steps.send(solver_input(solver, denoised=denoised, negative=denoised))
    except StopIteration as end:
        return end.value
    raise AssertionError("cycle() does not end")
