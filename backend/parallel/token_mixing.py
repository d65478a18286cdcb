"""Token mixing other than softmax attention, over SP ranks and in patches: linear attention, convolutions.

Linear attention: a rank sends its share of the state, a sum over tokens, whose size does not depend on their
number. A patch has a share of its own, cached from step to step: stale shares stand for other patches.
Convolutions: a rank is sent the halo, the tokens next to its own; patches read it from a buffer.
"""

import torch
from torch import Tensor

from ..models.common import token_mixing
from ..models.common.token_mixing import Halo
from ..runtime import opaque_ops
from . import comm
from .sequence import Span


class TokenMixing:
    """The functions of models/common/token_mixing.py within the blocks of ``attention``'s stage."""

    def __init__(self, attention):
        self.attention = attention
        self.sp = attention.mesh.sp

    def install(self):
        """Have the models mix tokens over the ranks of sequence parallelism, in the whole process."""
        opaque_ops.RUNNING.linear_state = self.linear_state
        token_mixing.linear_state = opaque_ops.state_over_ranks
        token_mixing.with_halo = self.with_halo
        token_mixing.local_text_tokens = opaque_ops.local_text_tokens
        token_mixing.has_text = self.has_text

    def uninstall(self):
        """Have the models mix tokens on one rank again."""
        opaque_ops.RUNNING.linear_state = None
        for name, function in token_mixing.ALONE.items():
            setattr(token_mixing, name, function)

    def has_text(self) -> bool:
        """Return whether text tokens pass the block that runs (token_mixing.has_text): in PipeFusion's later
        patches none do. A compiled block calls the layers of text nevertheless, and one whose compiler has
        failed on this rank must send what others send there."""
        attention = self.attention
        call = attention.call
        patches = attention.buffers is not None and not attention.compiled
        return call is None or not patches or call.dummy or len(call.tokens.text) > 0

    def linear_state(self, keys: Tensor, values: Tensor) -> Tensor:
        """Sum over ranks and patches (token_mixing.linear_state)."""
        call = self.attention.call
        buffers = self.attention.buffers
        if call is None:
            return keys.transpose(2, 3) @ values
        where = call.next()[1]
        if buffers is None:
            return self._over_ranks(keys.transpose(2, 3) @ values)
        own = call.tokens.local.image
        here = [i for i, span in enumerate(buffers.spans) if span.overlaps(call.tokens.image)]
        tokens = [buffers.spans[i].within(own).indices for i in here]
        own_shares = [keys[:, :, each].transpose(2, 3) @ values[:, :, each] for each in tokens]
        shares = self._over_ranks(torch.stack(own_shares, dim=1))  # (B, patches of this forward, ...)
        (state,) = buffers.refresh(
            where,
            [shares.flatten(2)[:, None]],
            positions=slice(here[0], here[-1] + 1),
            total=len(buffers.spans),
            context=call.context,
        )
        return state.sum(dim=2).view(shares.shape[0], *shares.shape[2:])

    def _over_ranks(self, share: Tensor) -> Tensor:
        if self.sp.size == 1:
            return share
        return comm.all_reduce(share.contiguous(), self.sp, "linear-attention state")

    def with_halo(self, x: Tensor, width: int) -> Halo:
        """Return the tokens and their halo over ranks and patches (token_mixing.with_halo)."""
        call = self.attention.call
        buffers = self.attention.buffers
        if call is None:
            return Halo(x, first=0, before=0)
        where = call.next()[1]
        if buffers is None and self.sp.size == 1:
            return Halo(x, first=0, before=0)
        tokens = call.tokens
        total = tokens.sequence.image
        own = tokens.local.image
        near = _near(own, width, total)
        if buffers is None:
            spans = [shard.image for shard in tokens.shards]
            return Halo(
                self._halo(x, spans=spans, near=near, width=width, total=total),
                first=near.lo,
                before=own.lo - near.lo,
            )
        shapes = [(x.shape[0], length, x.shape[2]) for length in tokens.lengths("image")]
        fresh = torch.cat(comm.all_gather(x, shapes, self.sp, "halo"), dim=1)
        positions = tokens.image.indices
        (whole,) = buffers.refresh(
            where, [fresh[:, None]], positions=positions, total=total, context=call.context
        )
        return Halo(whole[:, 0, near.indices], first=near.lo, before=own.lo - near.lo)

    def _halo(self, x: Tensor, spans: list[Span], near: Span, width: int, total: int) -> Tensor:
        """Return the tokens ``near`` this rank's, from whichever ranks have them."""
        own = spans[self.sp.rank]
        sent = [x[:, _near(span, width, total).within(own).indices] for span in spans]
        shapes = [(x.shape[0], len(span.within(near)), x.shape[2]) for span in spans]
        return torch.cat(comm.all_to_all(sent, shapes, self.sp, "halo"), dim=1)


def _near(span: Span, width: int, total: int) -> Span:
    return Span(max(0, span.lo - width), min(total, span.hi + width))
