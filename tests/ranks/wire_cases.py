"""Runs with float8 on the wire of Ulysses and rings, and one process that rounds what ranks would send."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from backend.config import ParallelConfig
from backend.parallel.attention import ulysses_ring
from backend.parallel.attention.attention_hook import Attention, BlockCall
from backend.parallel.attention.attention_kernels import attend_lse
from backend.parallel.wire import pack, unpack
from backend.parallel.wire_bytes import FP8

#: The variants of a run: with fresh and with stale keys and values.
WIRE, STALE = "fp8 wire", "fp8 wire, stale"


def rounded(x: Tensor) -> Tensor:
    """What arrives of ``x``."""
    return unpack(pack(x, FP8), x.dtype)


def merged(out: Tensor | None, lse: Tensor | None, block: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """merge_block in the type of its inputs: float32 would round sums of another order to other float8."""
    block_lse = block_lse.transpose(-2, -1).unsqueeze(-1).to(torch.float64)  # as blocks are
    if out is None or lse is None:
        return block, block_lse
    whole = torch.logaddexp(lse, block_lse)
    return out * (lse - whole).exp() + block * (block_lse - whole).exp(), whole


def around(kernel: str, q: Tensor, kv, groups: list[Tensor], ring: int, scale) -> Tensor:
    """Attend as rank ``ring`` of a ring does, in its order; ``groups``: each rank's tokens."""
    out = lse = None
    for hop in range(len(groups)):
        at = groups[(ring - hop) % len(groups)]
        k, v = (each[:, :, at] if hop == 0 else rounded(each[:, :, at]) for each in kv)
        block, block_lse = attend_lse(kernel, q, k, v, None, scale)
        out, lse = ulysses_ring.merge_block(out, lse, block.transpose(1, 2), block_lse)
    assert out is not None, "each rank has tokens"
    return out.transpose(1, 2).to(q.dtype)


def buffered(self: Attention, q: Tensor, kv, call: BlockCall, scale, keys, where, mine: Tensor, ring: int):
    """Attend as rank ``ring`` of a ring does with a stage's buffer of its own: what others send is rounded,
    its own tokens ``mine`` (of the patch) are not."""
    sent = [rounded(each).index_copy(2, mine, each[:, :, mine]) for each in kv]
    k, v = self._refresh(call, self.buffers, sent, keys, (*where, ring))
    return self._attend(q[:, :, mine], k, v, None, scale)


@contextmanager
def rounding(config: ParallelConfig) -> Iterator[None]:
    """Have one process that holds all tokens attend as the ranks of ``config`` do: Ulysses rounds queries,
    keys, values and outputs; a ring rank the keys and values of others."""
    attend = Attention._of_own_heads

    def simulated(self, q, kv, call: BlockCall, mask, scale, keys, where):
        u, r = config.ulysses_degree, config.ring_degree
        if u > 1:
            q, *kv = map(rounded, (q, *kv))
        if r == 1:
            out = attend(self, q, kv, call, mask, scale, keys, where)
        else:
            assert mask is None and q.shape == kv[0].shape, "of one kind, without hidden tokens"
            shards = replace(call.tokens, sp_size=u * r, shares=config.shares_of("ring", "ulysses"))
            patch = call.tokens.positions(keys)
            of_rings = (shards.positions(keys, range(ring * u, (ring + 1) * u)) for ring in range(r))
            groups = [torch.isin(patch, positions).nonzero().flatten() for positions in of_rings]
            out = torch.empty_like(q)
            for ring, mine in enumerate(groups):
                if self.buffers is None:
                    out[:, :, mine] = around(self.kernel, q[:, :, mine], kv, groups, ring, scale)
                else:
                    out[:, :, mine] = buffered(self, q, kv, call, scale, keys, where, mine, ring)
        return rounded(out) if u > 1 else out

    with mock.patch.object(Attention, "_of_own_heads", simulated):
        yield
