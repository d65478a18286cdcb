"""What plans of auto have met since this process started. Imports neither ComfyUI nor torch."""

from dataclasses import dataclass, field

from ...config import ParallelConfig
from ...planner.auto_config import AutoConfig
from ...planner.placement import Placement
from .model_choice import ModelChoice


@dataclass(frozen=True)
class LastPlan:
    """auto: what the plan was chosen for. regret: as Ranks.regret, after it. turns: models of the graph that
    take turns under it; none where all of them fit together."""

    auto: AutoConfig
    plan: ParallelConfig
    regret: dict[Placement, float]
    turns: tuple[ModelChoice, ...] = ()


@dataclass
class PlanHistory:
    """free: GPUs -> free bytes of each before our ranks took theirs. looked: GPUs -> when it was looked
    whether more is free, while ranks of ours run. spared: model and GPUs -> bytes of each rank that a plan
    has to leave free of what is counted, since ranks of one that left less ran out of memory; 0 where one
    runs again first, since another model may have been there. left: GPU and
    tokens of the request before -> bytes of weights that ComfyUI, short of room there, has left. tokens: of
    the request that was planned last. shared: the GPU on which ComfyUI computes, if any."""

    free: dict[tuple, tuple[int, ...]] = field(default_factory=dict)
    looked: dict[tuple, float] = field(default_factory=dict)
    spared: dict[tuple, int] = field(default_factory=dict)
    left: dict[tuple[int, int], int] = field(default_factory=dict)
    tokens: int = 0
    shared: int | None = None
    last: LastPlan | None = None

    def left_after(self, devices: list[int], tokens: int) -> tuple[tuple[int, int], ...]:
        """Return (index in ``devices``, bytes of weights) of each GPU on which ComfyUI left so many after
        requests of no more than ``tokens``."""
        weights: dict[int, int] = {}
        for (gpu, before), size in self.left.items():
            if gpu in devices and before <= tokens:
                index = devices.index(gpu)
                weights[index] = min(size, weights.get(index, size))
        return tuple(sorted(weights.items()))
