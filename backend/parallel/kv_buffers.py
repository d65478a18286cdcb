"""PipeFusion's keys and values (arXiv 2405.14430): the whole sequence of each attention call, rows fresh or
of the step before.

Stale rows are read as they are (reuse), or extrapolated (ours): K + r (K - K_prev), r the ratio of the steps
in sigma. That costs one more buffer and one elementwise pass a step, and no communication.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .sequence import Span

#: A step in sigma is at most this many times the one before, for extrapolation: beyond it the line through
#: two points says little.
MAX_RATIO = 1.0


@dataclass
class KVBuffers:
    """Buffers of one request, (2, B, H, rows, D) for each (branch, layer, call). ``batch`` is the request's;
    calls may cover some items of it.

    Sums and surroundings (see mixing.py) have one buffer in the place of two. ``spans``: the image rows of
    every patch.
    """

    batch: int
    extrapolate: bool = False
    spans: list[Span] = field(default_factory=list)
    evaluation: int = -1
    ratio: float = 0.0
    current: dict[tuple, Tensor] = field(default_factory=dict)
    previous: dict[tuple, Tensor] = field(default_factory=dict)
    _begun: dict[tuple, int] = field(default_factory=dict)

    def begin_evaluation(self, ratio: float):
        """A model call at the next noise level starts; ``ratio`` is its step in sigma over the step before
        it."""
        self.evaluation += 1
        self.ratio = min(max(ratio, 0.0), MAX_RATIO)

    def refresh(
        self, where: tuple, kv: Tensor, rows: slice | Tensor, total: int, items: slice
    ) -> tuple[Tensor, ...]:
        """Write fresh ``kv`` (2, b, H, n, D) into ``rows`` of ``items``; keys and values (b, H, total, D) to
        attend to."""
        if where not in self.current:
            self.current[where] = self._empty(kv, total)
        if self.extrapolate and self._begun.get(where) != self.evaluation:
            self._begin(where, kv.shape[3] == total)
            self._begun[where] = self.evaluation
        buffer = self.current[where][:, items]
        if isinstance(rows, slice):
            buffer[:, :, :, rows] = kv
        else:
            buffer.index_copy_(3, rows, kv)
        return tuple(buffer)

    def _empty(self, kv, total):
        return kv.new_empty((kv.shape[0], self.batch, kv.shape[2], total, kv.shape[4]))

    def _begin(self, where: tuple, everything: bool):
        """The first write of an evaluation: ``current`` holds the last one's fresh rows, which become
        ``previous``."""
        if where not in self._begun:
            return  # nothing was written before
        last, before = self.current[where], self.previous.get(where)
        if everything:
            self.current[where] = torch.empty_like(last) if before is None else before
        elif before is None:
            self.current[where] = last.clone()  # one point makes no line: reuse
        else:
            self.current[where] = before.mul_(-self.ratio).add_(last, alpha=1 + self.ratio)
        self.previous[where] = last

    @property
    def bytes(self) -> int:
        """Memory of all buffers."""
        return sum(
            x.numel() * x.element_size() for kept in (self.current, self.previous) for x in kept.values()
        )
