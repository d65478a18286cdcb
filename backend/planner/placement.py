"""Whether ranks read weights again for another plan, which takes seconds that one request may not gain back.

The planner counts for each placement how much longer past requests would have taken, had ranks ended there,
each with the best plan that these weights allow, moves included. Ranks go to the placement with the least,
and stay on a tie. All is counted anew after a move. Up to a move this is a work function of metrical task
systems (Borodin, Linial, Saks, J. ACM 39, 1992): requests that want different plans in turn do not move
weights each time, and many equal ones get their best plan.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..config import ParallelConfig
from .machine import RequestEstimate
from .model_shape import ModelShape
from .weight_swaps import FILE_RATE, read_bytes

#: A plan that runs stays while the best one is not so many times as fast: less may be the estimate's error.
STAYS = 1.1
#: Seconds in which other ranks start. Not measured on GPUs.
START_SECONDS = 10.0
#: How weights lie on ranks: ParallelConfig.placement.
Placement = tuple
#: Plan -> what it takes for a request; of plans that could run.
Scores = dict[ParallelConfig, float]


@dataclass(frozen=True)
class Ranks:
    """Ranks that run.

    plan: theirs. held: models of a graph whose weights they hold. regret: placement -> how many seconds
    slower past requests would have been, had they ended there; for a placement without an entry, the seconds
    of moving there. rate: bytes/s from files of all ranks together.
    """

    plan: ParallelConfig
    held: tuple[ModelShape, ...] = ()
    regret: Mapping[Placement, float] = field(default_factory=dict)
    rate: float = FILE_RATE

    def change(self, plan: ParallelConfig, request: RequestEstimate) -> float:
        """Return the seconds until models lie as ``plan`` needs them: 0 where they do, or none is held."""
        if not self.held or self.plan.same_weights(plan):
            return 0.0
        size = sum(read_bytes(shape, plan, request) for shape in self.held)
        start = START_SECONDS if plan.world_size != self.plan.world_size else 0.0
        return start + size / self.rate


def choose_placement(
    scores: Scores, further: list[Scores], running: Ranks | None, request: RequestEstimate
) -> tuple[ParallelConfig, dict[Placement, float]]:
    """Return the plan of ``scores`` for a request, and Ranks.regret after it. ``further``: of the
    requests that follow in the same graph, which count where one placement serves them all. ``running``: None
    for ranks that have yet to start."""
    plans, totals = _by_placement(scores, further)
    here = running.plan.placement if running else ()
    if running is None or here not in totals:  # there is no staying
        return plans[min(totals, key=totals.__getitem__)], {}
    ends = {}
    for place, total in totals.items():
        noticed = totals[here] if total < totals[here] <= STAYS * total else total
        start = min(running.regret.get(place, math.inf), running.change(plans[place], request))
        ends[place] = start + noticed
    best = min(ends, key=lambda place: (ends[place], place != here))
    # once they have moved, the way back takes all of its seconds again
    regret = {place: end - ends[best] for place, end in ends.items()} if best == here else {}
    same = best == here and scores.get(running.plan, math.inf) <= STAYS * scores[plans[best]]
    return running.plan if same else plans[best], regret


def _by_placement(
    scores: Scores, further: list[Scores]
) -> tuple[dict[Placement, ParallelConfig], dict[Placement, float]]:
    """Return for each placement the best plan for the request, and what all requests take there."""
    plans: dict[Placement, ParallelConfig] = {}
    for plan in sorted(scores, key=scores.__getitem__):
        plans.setdefault(plan.placement, plan)
    own = {place: scores[plan] for place, plan in plans.items()}
    totals = dict(own)
    for others in further:
        least: dict[Placement, float] = {}
        for plan, score in others.items():
            least[plan.placement] = min(score, least.get(plan.placement, math.inf))
        totals = {place: total + least[place] for place, total in totals.items() if place in least}
    return plans, totals or own
