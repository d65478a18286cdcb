"""USP (arXiv 2405.07719): DeepSpeed-Ulysses (arXiv 2309.14509) x ring attention (arXiv 2310.01889).

Token counts and heads may be uneven. A ring merges by log-sum-exp, as yunchang does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import torch
from torch import Tensor

from ...shares import shard_sizes
from ..comm import begin_all_to_all, pass_on
from ..mesh import Axis
from ..sequence import Span
from ..wire import pack, unpack
from ..wire_bytes import FULL
from .attention_kernels import attend_lse
from .ring_library import ring_library

#: Query tokens of a tile of attention's kernels, and how many tiles (of heads and samples too) half of a
#: rank's heads must have to be computed apart: fewer do not fill a large GPU.
TILE = 128
TILES_OF_A_CHUNK = 128


def head_chunks(heads: int, batch: int, tokens: int, axis: Axis, groups: int = 0) -> int:
    """Return in how many chunks (1 or 2) heads are sent, ``groups`` of them whole (by default each):
    attention over one hides the all-to-all of the other.

    All ranks must find the same, so no property of a GPU counts.
    """
    groups = groups or heads
    least = min(shard_sizes(groups, count=axis.size, shares=axis.shares)) // 2 * (heads // groups)
    return 2 if least * batch * -(-tokens // TILE) >= TILES_OF_A_CHUNK and least else 1


def scatter_heads(
    tensors: Sequence[Tensor],
    lengths: list[int],
    axis: Axis,
    chunk: int = 0,
    chunks: int = 1,
    groups: int = 0,
) -> Callable[[torch.dtype], list[Tensor]]:
    """Begin to turn token shards into head shards by one packed all-to-all: several (B, H, own tokens, D) ->
    (B, own heads, all tokens, D) in a type, which the returned function waits for. ``lengths``: tokens of
    each Ulysses rank. ``chunk`` of ``chunks``: of each rank's heads. ``groups`` of heads stay whole, those of
    keys and values where queries have more; by default each head is one.

    Tokens are the slowest on the wire, so what comes from all ranks is in order, and is not copied again.
    """
    batch, heads, tokens, size = tensors[0].shape
    groups = groups or heads
    widths = [tensor.shape[1] // groups for tensor in tensors]  # heads of a group
    ends = [*accumulate(widths)]
    shards = shard_sizes(groups, count=axis.size, shares=axis.shares)
    counts = [len(Span(0, shard).shard(chunk, chunks)) for shard in shards]
    row = ends[-1] * batch * size  # numbers of a token and group
    sent = [tokens * count * row for count in counts]
    flat = tensors[0].new_empty(sum(sent))
    last = 0
    filled = 0
    for shard, ranks in _runs(shards):
        first = last
        last = first + shard * ranks
        chosen = Span(0, shard).shard(chunk, chunks)
        end = filled + tokens * len(chosen) * ranks * row
        buffer = flat[filled:end].view(ranks, tokens, ends[-1], batch * len(chosen) * size)
        filled = end
        for tensor, width, stop in zip(tensors, widths, ends):
            of_ranks = tensor[:, first * width : last * width].unflatten(1, (ranks, shard * width))
            cut = of_ranks[:, :, chosen.lo * width : chosen.hi * width]
            part = buffer[:, :, stop - width : stop]
            part.view(ranks, tokens, batch, len(chosen) * width, size).copy_(cut.permute(1, 3, 0, 2, 4))
    own = counts[axis.rank]
    under_way = begin_all_to_all(flat, sent, [length * own * row for length in lengths], axis, "ulysses")

    def wait(dtype: torch.dtype) -> list[Tensor]:
        received = under_way().view(sum(lengths), ends[-1] * batch * own, size)
        kinds = unpack(received, dtype).split([width * batch * own for width in widths], dim=1)
        by_head = (kind.unflatten(1, (batch, own * width)) for kind, width in zip(kinds, widths))
        return [kind.permute(1, 2, 0, 3) for kind in by_head]

    return wait


def _runs(shards: list[int]) -> list[tuple[int, int]]:
    """Return (groups, how many) of consecutive ranks that have equally many groups of heads, one at least."""
    return [(shard, len(list(ranks))) for shard, ranks in groupby(filter(None, shards))]


@dataclass
class GatheredHeads:
    """Undoes scatter_heads: (B, own heads, all tokens, D) of every chunk -> (B, H, own tokens, D).

    heads: of all ranks. lengths: tokens of each Ulysses rank. groups: as in scatter_heads.
    """

    heads: int
    lengths: list[int]
    axis: Axis
    chunks: int = 1
    groups: int = 0
    under_way: list[tuple[Callable[[], Tensor], list[int]]] = field(default_factory=list)

    def send(self, out: Tensor):
        """Begin the all-to-all of the next chunk: ``out`` (B, own heads, all tokens, D)."""
        batch, own, _, size = out.shape
        tokens = self.lengths[self.axis.rank]
        groups = self.groups or self.heads
        chunk = len(self.under_way)
        shards = shard_sizes(groups, count=self.axis.size, shares=self.axis.shares)
        counts = [len(Span(0, shard).shard(chunk, self.chunks)) * self.heads // groups for shard in shards]
        sent = [length * batch * own * size for length in self.lengths]
        sizes = [tokens * batch * count * size for count in counts]
        flat = out.permute(2, 0, 1, 3).reshape(-1)
        self.shape = (tokens, batch, -1, size)
        self.under_way.append((begin_all_to_all(flat, sent, sizes, self.axis, "ulysses"), sizes))

    def wait(self) -> Tensor:
        """Return the tensor of all chunks, its heads adjacent in memory for the projection after it."""
        tokens, batch, _, size = self.shape
        received = [end().split(sizes) for end, sizes in self.under_way]
        by_rank = [heads for of_rank in zip(*received) for heads in of_rank if heads.numel()]
        if not by_rank:
            return received[0][0].new_empty(batch, self.heads, tokens, size)
        whole = torch.cat([heads.view(self.shape) for heads in by_rank], dim=2)
        return whole.permute(1, 2, 0, 3)


def merge_block(
    out: Tensor | None, lse: Tensor | None, block: Tensor, block_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention's output ``block`` (B, S, H, D) and its log-sum-exp (B, H, S) into those of earlier
    keys: ``out`` in float32, which is overwritten, and ``lse`` (B, S, H, 1). Return both."""
    if out is None or lse is None:
        return ring_library().update_out_and_lse(None, None, block, block_lse)
    # yunchang's update_out_and_lse in place, since it holds four outputs in float32 at once. Its log-sum-exp,
    # lse - logsigmoid(lse - block_lse), is the same but where a query has seen NOTHING yet: there it is 0.
    block_lse = block_lse.transpose(-2, -1).unsqueeze(-1)
    weight = torch.sigmoid(block_lse - lse)
    return out.lerp_(block.to(out.dtype), weight), torch.logaddexp(lse, block_lse)


def ring_attend(
    kernel: str,
    q: Tensor,
    own: list[Tensor],
    lengths: list[int],
    axis: Axis,
    masks: Sequence[Tensor | None],
    scale: float | None,
    wire: str = FULL,
) -> Tensor:
    """Attend with own queries to the keys and values of every ring rank, which travel in one buffer a hop.

    q (B, H, S, D); own: keys and values (2, B, H, own tokens, D), taken out of their list, since a frame
    of the caller would hold an argument to the end; ``lengths[i]`` tokens on ring rank i; ``masks[i]`` for
    the keys of rank i, or None; ``wire``: how they travel, own ones stay as they are. Returns (B, H, S, D).
    """
    assert axis.group is not None, "a ring has several ranks"
    out = None
    lse = None
    kv = own.pop().contiguous()
    dtype = kv.dtype
    travelling = pack(kv, wire)
    for hop in range(axis.size):
        source = (axis.rank - hop) % axis.size
        shape = (*travelling.shape[:3], lengths[source - 1], travelling.shape[4])
        incoming = pass_on(travelling, shape, axis, "ring") if hop + 1 < axis.size else None
        if lengths[source] and q.shape[2]:
            here = unpack(travelling, dtype) if hop else kv
            block, block_lse = attend_lse(kernel, q, here[0], here[1], mask=masks[source], scale=scale)
            out, lse = merge_block(out, lse, block.transpose(1, 2), block_lse)
            del here, block
        if incoming:
            kv = travelling = incoming()
        incoming = None  # what this hop has sent is done with, before the next one receives
    return q if out is None else out.transpose(1, 2).to(q.dtype)
