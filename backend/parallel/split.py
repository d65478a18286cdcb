"""Which blocks of a transformer each pipeline stage holds."""

from itertools import accumulate


def stage_blocks(costs: list[float], stages: int) -> list[range]:
    """Consecutive ranges of blocks, none empty, whose dearest stage is as cheap as can be; ``costs`` is the work of each block.

    Among equal splits the one that spreads the rest most evenly (least sum of squares) is taken. ``stages`` <= number of blocks.
    """
    if not costs:
        return [range(0)] * stages
    upto = [0, *accumulate(costs)]
    # best[n][i]: (dearest stage, sum of squares, cuts) for the first i blocks on n stages
    best = {i: (upto[i], upto[i] ** 2, [0, i]) for i in range(1, len(costs) + 1)}
    for stage in range(2, stages + 1):
        best = {i: min(_extend(best[j], upto[i] - upto[j], i) for j in range(stage - 1, i)) for i in range(stage, len(costs) + 1)}
    cuts = best[len(costs)][2]
    return [range(lo, hi) for lo, hi in zip(cuts, cuts[1:])]


def _extend(plan, cost, end):
    dearest, squares, cuts = plan
    return max(dearest, cost), squares + cost**2, [*cuts, end]


def explicit_blocks(counts: list[int]) -> list[range]:
    """The ranges of an explicit list: ``counts[i]`` blocks on stage i."""
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends)]
