"""The solvers by name, and the list of model calls that one makes. The solvers themselves are in solvers/."""

from dataclasses import dataclass

import torch

from .solver_names import HALF_LOG_SNR, NEEDS_NEGATIVE, SOLVERS
from .solvers import dpmpp, euler, exponential, multistep, unipc
from .solvers.problem import Problem

Tensor = torch.Tensor

_FAMILIES = (euler, dpmpp, multistep, exponential, unipc)
#: ddim is ComfyUI's: Euler steps, and its own noise where a mask keeps part of the latent (see request.Inpaint).
_ALIASES = {"ddim": "euler"}


def _function(name: str):
    name = _ALIASES.get(name, name)
    return next(vars(family)[name] for family in _FAMILIES if name in vars(family))


SOLVER_FUNCTIONS = {name: _function(name) for name in SOLVERS}


@dataclass(frozen=True)
class Evaluation:
    """One call of the model: at which noise level, in which step of the schedule."""

    sigma: Tensor
    step: int


def answer(solver: str, denoised: Tensor, negative: Tensor):
    """What ``solver`` is sent for a model call: the prediction, or a pair with the negative prompt's (before guidance and mask)."""
    return (denoised, negative) if solver in NEEDS_NEGATIVE else denoised


def needs_percent_sigmas(solver: str, flow: bool, first_sigma: float) -> bool:
    """Does the solver ask for noise levels that the schedule alone does not tell (Problem.percent_to_sigma)?"""
    return solver == "sa_solver" or (solver in HALF_LOG_SNR and flow and first_sigma >= 1)


def evaluations(solver: str, problem: Problem) -> list[Evaluation]:
    """Every model call that ``solver`` will make, in order, known before the first: stages that hold no latent follow this list."""
    zero = torch.zeros(())
    stand_in = Problem(problem.sigmas.cpu(), problem.prediction, lambda k: zero, lambda a, b: zero, problem.percent_to_sigma)
    dry = SOLVER_FUNCTIONS[solver](zero, stand_in)
    plan, request = [], next(dry, None)
    while request is not None:
        plan.append(Evaluation(request[1], request[2]))
        try:
            request = dry.send(answer(solver, zero, zero))
        except StopIteration:
            request = None
    return plan
