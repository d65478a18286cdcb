"""What each stage holds: consecutive blocks, balanced by work, and modulation, placed to balance the weights.

Blocks of as much work can differ in weights: Flux' double blocks hold twice the matrices of its single ones.
Modulation is computed once a request, so another stage than the block's may hold its layers (27 % of Flux).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..shares import relative_shares

#: Tokens of a typical request, for which stages are balanced: 1024 x 1024 pixels, a prompt of 512 tokens.
IMAGE_TOKENS, TEXT_TOKENS = 4096, 512
#: Most weights of a stage, as a multiple of the mean over the stages, if there is a split of so few.
MAX_WEIGHTS = 1.15
#: Up to this multiple of the mean a stage keeps the modulation layers of its own blocks.
OWN_WEIGHTS = 1.05


@dataclass(frozen=True)
class Stages:
    """Which blocks and modulation layers each stage holds. blocks: those of every stage. owners: modulation
    layer -> the stage of its block; holders: -> the stage that has its weights and computes it."""

    blocks: list[range]
    owners: Mapping[str, int]
    holders: Mapping[str, int]

    def hosted(self, stage: int) -> list[str]:
        """List the modulation layers that ``stage`` holds for the blocks of others."""
        return [name for name, holder in self.holders.items() if holder == stage != self.owners[name]]


def plan(
    costs: list[float],
    weights: list[int],
    modulation: Sequence[Mapping[str, int]],
    stages: int,
    counts: Sequence[int] = (),
    shares: Sequence[float] = (),
) -> Stages:
    """Place a transformer on stages. Block i has the FLOPs ``costs[i]``, ``weights[i]`` parameters, and the
    modulation layers ``modulation[i]`` (name -> parameters). ``counts`` fixes the blocks of every stage;
    otherwise work and weights follow ``shares``."""
    mean = (sum(weights) + sum(sum(layers.values()) for layers in modulation)) / stages
    means = [portion * mean for portion in relative_shares(stages, shares)]
    blocks = explicit_blocks(counts)
    if not counts:
        blocks = stage_blocks(costs, stages=stages, weights=weights, most=MAX_WEIGHTS * mean, shares=shares)
    owners = {name: stage for stage, own in enumerate(blocks) for i in own for name in modulation[i]}
    sizes = {name: size for layers in modulation for name, size in layers.items()}
    held = [sum(weights[i] for i in own) for own in blocks]
    return Stages(blocks, owners, _placed(owners, sizes, held, means))


def _placed(owners: Mapping[str, int], sizes: Mapping[str, int], held: list[int], means: list[float]):
    """Return layer -> stage: its own while that has room, else the stage with the least weights (``held``),
    both by what each stage would hold of equal weights (``means``)."""
    placed = {}
    rest = []
    for name, owner in owners.items():
        if held[owner] + sizes[name] <= OWN_WEIGHTS * means[owner]:
            placed[name] = owner
            held[owner] += sizes[name]
        else:
            rest.append(name)
    for name in rest:
        placed[name] = min(range(len(held)), key=lambda stage: held[stage] / means[stage])
        held[placed[name]] += sizes[name]
    return {name: placed[name] for name in owners}


def stage_blocks(
    costs: list[float],
    stages: int,
    weights: list[int] | None = None,
    most: float = 0.0,
    shares: Sequence[float] = (),
) -> list[range]:
    """Split blocks into consecutive ranges, none empty, whose most expensive stage is as cheap as can be.

    costs: MACs of each block. Among equal splits the most even (least sum of squares) is taken. With
    ``weights`` only splits whose every stage weighs at most ``most``, if there is one. ``shares``: of the
    stages' speed, by which costs and ``most`` are divided.
    """
    if not costs:
        return [range(0)] * stages
    speeds = relative_shares(stages, shares)
    ranges = _cheapest(costs, speeds, weights=weights, most=most) if weights else None
    ranges = ranges or _cheapest(costs, speeds, weights=[0] * len(costs), most=0.0)
    assert ranges is not None, "without a limit on weights there is always a split"
    return ranges


def _cheapest(costs: list[float], speeds: list[float], weights: list[int], most: float) -> list[range] | None:
    upto = [0, *accumulate(costs)]
    heavy = [0, *accumulate(weights)]
    # best[i]: (most expensive stage, sum of squares, cuts) for the first i blocks on the stages so far
    best = {0: (0.0, 0.0, [0])}
    for speed in speeds:
        plans = defaultdict(list)
        for start, (highest, squares, cuts) in best.items():
            for end in range(start + 1, len(upto)):
                if heavy[end] - heavy[start] <= most * speed:
                    cost = (upto[end] - upto[start]) / speed
                    plans[end].append((max(highest, cost), squares + cost**2, [*cuts, end]))
        best = {end: min(found) for end, found in plans.items()}
    if len(costs) not in best:
        return None
    return [range(lo, hi) for lo, hi in pairwise(best[len(costs)][2])]


def explicit_blocks(counts: Sequence[int]) -> list[range]:
    """Return the ranges of an explicit list: ``counts[i]`` blocks on stage i."""
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends)]
