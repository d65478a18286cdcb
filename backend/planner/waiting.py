"""Seconds in which weights leave the GPUs and come back: of models that take turns, and for ComfyUI's own."""

from dataclasses import dataclass, replace

from ..config import ParallelConfig
from .machine import Request
from .memory import held, held_by_rank
from .model_shape import ModelShape

#: Bytes/s from a file for all ranks together where no load of it was measured: of a slow NVMe.
FILE_RATE = 1.5e9


@dataclass(frozen=True)
class Waiting:
    """Where weights wait. host: bytes of host memory for them; 0 for enough. file: bytes/s of the model's
    last load from its file, of all ranks together; 0 where none is known. beside: (rank, bytes of weights)
    for each GPU on which ComfyUI, short of room between two requests, has left so many."""

    host: int = 0
    file: float = 0.0
    beside: tuple[tuple[int, int], ...] = ()

    def reads(self, plan: ParallelConfig, leaving: int) -> bool:
        """Return whether ``leaving`` bytes, on all ranks, are freed and read again, as sharded weights are
        and those for which host memory has no room (rank.py), rather than parked."""
        return plan.shard_weights or 0 < self.host < leaving

    @property
    def source(self) -> str:
        """Say where weights come from that are read again, and how fast."""
        if self.file:
            return f"from its file, at the {self.file / 1e9:.1f} GB/s of its last load"
        return f"from its file, at {FILE_RATE / 1e9:.1f} GB/s, which is assumed"

    def swap(
        self, shape: ModelShape, plan: ParallelConfig, request: Request, others: tuple, link: float
    ) -> tuple[float, bool]:
        """Return the seconds in which the weights of one of ``others`` leave the ranks and those of ``shape``
        come, and whether these are read. ``link``: bytes/s between a GPU and host memory."""
        own = held(shape, plan, request).weights
        theirs = replace(request, loras=request.other_loras)
        waiting = max(held(other, plan, theirs).weights for other in others)
        # they are parked while those of ``shape`` still are, and half of what memory these leave counts
        if self.reads(plan, (waiting + own // 2) * plan.world_size):
            return self._reading(own * plan.world_size), True
        return (own + waiting) / link, False

    def aside(
        self, shape: ModelShape, plan: ParallelConfig, request: Request, others: tuple, link: float
    ) -> tuple[float, bool]:
        """Return the seconds in which weights of ``shape`` leave a GPU for ComfyUI's own models and come
        back, once for each request, and whether they are read. Arguments as in ``swap``; all the models stay
        on the ranks otherwise."""
        if not self.beside:
            return 0.0, False
        theirs = replace(request, loras=request.other_loras)
        models = [held_by_rank(shape, plan, request), *(held_by_rank(each, plan, theirs) for each in others)]
        seconds, reads = 0.0, False
        for rank, left in self.beside:
            if rank >= plan.world_size:
                continue
            sizes = [ranks[rank].weights for ranks in models]
            gone = _gone(sizes, left)
            if gone and self.reads(plan, gone):
                seconds, reads = self._reading(sum(each.weights for each in models[0])), True
                break  # they are freed on every rank
            # a request pays for its own model
            seconds += 2 * gone * sizes[0] / max(1, sum(sizes)) / link
        return seconds, reads

    def _reading(self, size: int) -> float:
        return size / (self.file or FILE_RATE)


def _gone(sizes: list[int], left: int) -> int:
    """Return the bytes of the models that ComfyUI takes, whole and the smallest first, until no more than
    ``left`` stay."""
    stay = sum(sizes)
    for size in sorted(sizes):
        stay -= size if stay > left else 0
    return sum(sizes) - stay
