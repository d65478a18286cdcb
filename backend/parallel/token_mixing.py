"""Rows that a model mixes by sums (linear attention) and by their surroundings (convolutions), over
sequence-parallel ranks and in patches.

Sums: a rank sends its share of the sum, whose size does not depend on the number of rows (USP of linear
attention). In patches every patch has a share of its
own, kept from step to step: stale shares of the others stand in for their rows (PipeFusion with a buffered
state). Surroundings: a rank is sent the rows next to its own; patches read the others' from a buffer of all
rows.
"""

import torch
from torch import Tensor

from ..models.common import token_mixing
from ..models.common.token_mixing import Halo
from . import comm
from .sequence import Span


class Mixing:
    """Answers for models/common/token_mixing.py within the blocks of ``attention``'s stage; the arguments are
    explained there."""

    def __init__(self, attention):
        self.attention, self.sp = attention, attention.mesh.sp

    def install(self):
        """Take the place of the functions that serve one process."""
        vars(token_mixing).update({name: getattr(self, name) for name in token_mixing.ALONE})

    def uninstall(self):
        """Give the functions their places back."""
        vars(token_mixing).update(token_mixing.ALONE)

    def sum_over_tokens(self, part) -> Tensor:
        """mixing.whole_sum over ranks and patches."""
        call, buffers = self.attention.call, self.attention.buffers
        if call is None:
            return part(slice(None))
        where = call.next()[1]
        if buffers is None:
            return self._over_ranks(part(slice(None)))
        own, image = call.rows.local.image, call.rows.image
        mine = [i for i, span in enumerate(buffers.spans) if span.lo < image.hi and image.lo < span.hi]
        shares = self._over_ranks(
            torch.stack([part(_within(own, buffers.spans[i])) for i in mine], dim=1)
        )  # (B, patches of this forward, ...)
        (kept,) = buffers.refresh(
            where,
            shares.flatten(2)[None, :, None],
            slice(mine[0], mine[-1] + 1),
            len(buffers.spans),
            call.items,
        )
        return kept.sum(dim=2).view(shares.shape[0], *shares.shape[2:])

    def _over_ranks(self, share):
        return share if self.sp.size == 1 else comm.reduce(share.contiguous(), self.sp, "sums")

    def with_halo(self, x: Tensor, reach: int) -> Halo:
        """mixing.all_around over ranks and patches."""
        call, buffers = self.attention.call, self.attention.buffers
        if call is None:
            return Halo(x, 0, 0)
        where, rows = call.next()[1], call.rows
        if buffers is None and self.sp.size == 1:
            return Halo(x, 0, 0)
        own = rows.local.image
        near = _near(own, reach, rows.sequence.image)
        if buffers is None:
            return Halo(
                self._exchange(x, [share.image for share in rows.shards], near, reach, rows.sequence.image),
                near.lo,
                own.lo - near.lo,
            )
        shapes = [(x.shape[0], length, x.shape[2]) for length in rows.lengths("image")]
        fresh = torch.cat(comm.gather(x, shapes, self.sp, "surroundings"), dim=1)
        (kept,) = buffers.refresh(
            where, fresh[None, :, None], slice(rows.image.lo, rows.image.hi), rows.sequence.image, call.items
        )
        return Halo(kept[:, 0, near.lo : near.hi], near.lo, own.lo - near.lo)

    def text_tokens(self, whole: int) -> int:
        """mixing.text_rows over ranks and patches."""
        call = self.attention.call
        return whole if call is None else len(call.rows.local.text)

    def _exchange(self, x, spans, near, reach, total):
        """The rows ``near`` to this rank's, from whichever ranks have them."""
        own = spans[self.sp.rank]
        parts = [x[:, _within(own, _near(span, reach, total))] for span in spans]
        shapes = [
            (x.shape[0], len(range(*_within(near, span).indices(len(near)))), x.shape[2]) for span in spans
        ]
        return torch.cat(comm.exchange(parts, shapes, self.sp, "surroundings"), dim=1)


def _near(span: Span, reach: int, total: int) -> Span:
    return Span(max(0, span.lo - reach), min(total, span.hi + reach))


def _within(own: Span, other: Span) -> slice:
    """The rows that both have, counted from the first of ``own``."""
    lo = min(max(own.lo, other.lo), own.hi)
    return slice(lo - own.lo, max(lo, min(own.hi, other.hi)) - own.lo)
