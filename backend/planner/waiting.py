"""Seconds in which weights leave the GPUs and come back: of models that take turns."""

from dataclasses import dataclass

from ..config import ParallelConfig
from .machine import Request
from .memory import held
from .model_shape import ModelShape

#: Bytes/s from a file for all ranks together where no load of it was measured: of a slow NVMe.
FILE_RATE = 1.5e9


@dataclass(frozen=True)
class Waiting:
    """Where weights wait. host: bytes of host memory for them; 0 for enough. file: bytes/s of the model's
    last load from its file, of all ranks together; 0 where none is known."""

    host: int = 0
    file: float = 0.0

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
        waiting = max(held(other, plan, request).weights for other in others)
        if self.reads(plan, waiting * plan.world_size):
            return self._reading(own * plan.world_size), True
        return (own + waiting) / link, False

    def _reading(self, size: int) -> float:
        return size / (self.file or FILE_RATE)
