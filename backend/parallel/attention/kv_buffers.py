"""PipeFusion's key/value buffers (arXiv 2405.14430): each attention call's whole sequence, fresh or stale.

Stale tokens are read as they are, or extrapolated: K + r (K - K_prev), with r the ratio of the steps in
sigma. That costs one more buffer and one elementwise pass a step, and no communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..sequence import Span
from ..step_context import StepContext

#: Most ratio of a step in sigma to the one before: beyond it the line through two points says little.
MAX_RATIO = 1.0


@dataclass
class KVBuffers:
    """Buffers of one request, (2, B, H, tokens, D) for each (prompt, layer, call), and with Ulysses for each
    chunk of its heads; (1, ...) for linear-attention states and halos (token_mixing.py). ``batch``: samples
    of this replica. ``extrapolate``: see the module. ``spans``: the image tokens of every patch."""

    batch: int
    extrapolate: bool = False
    spans: list[Span] = field(default_factory=list)
    ratio: float = 0.0
    current: dict[tuple, Tensor] = field(default_factory=dict)
    previous: dict[tuple, Tensor] = field(default_factory=dict)
    _written: dict[tuple, int] = field(default_factory=dict)

    def begin_evaluation(self, ratio: float):
        """Start an evaluation; ``ratio``: its step in sigma over the one before."""
        self.ratio = min(max(ratio, 0.0), MAX_RATIO)

    def refresh(
        self, where: tuple, kv: Sequence[Tensor], positions: slice | Tensor, total: int, context: StepContext
    ) -> tuple[Tensor, ...]:
        """Write fresh keys and values, each (b, H, n, D), at the ``positions`` (n,) of the samples of
        ``context``; return those samples' (b, H, total, D) to attend to."""
        _, heads, tokens, size = kv[0].shape
        if where not in self.current:
            self.current[where] = kv[0].new_empty(len(kv), self.batch, heads, total, size)
        if self.extrapolate and self._written.get(where) != context.evaluation:
            self._begin(where, tokens == total)
            self._written[where] = context.evaluation
        buffers = self.current[where][:, context.samples].unbind()
        for buffer, fresh in zip(buffers, kv):
            if isinstance(positions, slice):
                buffer[:, :, positions] = fresh
            else:
                buffer.index_copy_(2, positions, fresh)
        return buffers

    def _begin(self, where: tuple, whole: bool):
        """Prepare the first write of an evaluation: tokens in ``current`` become ``previous``."""
        if where not in self._written:
            return  # nothing was written before
        last = self.current[where]
        before = self.previous.get(where)
        if whole:
            self.current[where] = torch.empty_like(last) if before is None else before
        else:
            # One point makes no line: reuse, by the kernels of later evaluations. Their first launch may wait
            # for the device, which by then waits for messages that this rank receives ahead.
            ratio = 0.0 if before is None else self.ratio
            before = torch.zeros_like(last) if before is None else before
            self.current[where] = before.mul_(-ratio).add_(last, alpha=1 + ratio)
        self.previous[where] = last

    @property
    def bytes(self) -> int:
        buffers = [*self.current.values(), *self.previous.values()]
        return sum(buffer.nbytes for buffer in buffers)
