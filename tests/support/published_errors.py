"""How far the planner's cost model is from published times of several GPUs."""

from dataclasses import replace
from functools import cache

from published import CASES, Case

from backend.planner.machine import Machine

#: How many times its machine's rates a table's one GPU may have: more, and its request is not what ran.
PLAUSIBLE = (0.5, 1.5)


def fitted(case: Case) -> Machine:
    """Scale the rates of a case's machine until one GPU takes the published seconds: what a model's kernels
    reach is the only thing that is taken from a table."""
    low, high = 0.05, 20.0
    machine = case.machine
    for _ in range(60):
        factor = (low * high) ** 0.5
        machine = replace(
            case.machine, gemm=case.machine.gemm * factor, attention=case.machine.attention * factor
        )
        slower = case.projected("1", machine) > case.seconds["1"]
        low, high = (factor, high) if slower else (low, factor)
    return machine


@cache
def published() -> list[tuple[Case, str, float, float]]:
    """Return (case, plan, published seconds, projected seconds) of every plan of several GPUs that stands
    next to one GPU's."""
    of_plans = []
    for case in (each for each in CASES if "1" in each.seconds):
        machine = fitted(case)
        plans = [name for name in case.plans if name != "1"]
        of_plans += [(case, name, case.seconds[name], case.projected(name, machine)) for name in plans]
    return of_plans


def errors() -> list[float]:
    """Return the relative error of every projection, smallest first."""
    return sorted(abs(projected / seconds - 1) for _, _, seconds, projected in published())


def middle(ordered: list[float], part: float = 0.5) -> float:
    """Return the number below which so large a part of the sorted numbers lies."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def of_pipefusion() -> list[float]:
    """Return the signed errors of PipeFusion's projections, smallest first."""
    return sorted(
        projected / seconds - 1
        for case, name, seconds, projected in published()
        if case.plans[name].pipefusion_degree > 1
    )
