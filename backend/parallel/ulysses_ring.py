"""Unified sequence parallelism: DeepSpeed-Ulysses (arXiv 2309.14509) x ring attention (arXiv 2310.01889), as
in USP (arXiv 2405.07719).

Token counts and heads may be uneven. The ring's transfer and its merge by log-sum-exp are yunchang's.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from ..shares import edges
from .attention_kernels import attend_lse
from .comm import WAITING, count, exchange
from .kernel_table import import_error
from .mesh import Axis

#: Whose ring is used, and what it imports as it is imported, if they are installed.
RING_LIBRARY = "yunchang"
RING_IMPORTS = ("flash_attn", "flashinfer", "sageattention")


def ring_unavailable() -> str | None:
    """Say why there is no ring attention, as one sentence that names the package at fault; None where there
    is."""
    package = RING_LIBRARY
    error = import_error("yunchang.ring.utils")
    if not error:
        return None
    for name in filter(importlib.util.find_spec, RING_IMPORTS):
        if import_error(name):
            package = name
            error = import_error(name)
    return (
        f"ring_degree is above 1, but the package {package} cannot be imported ({error}); reinstall or "
        f"remove it, or set ring_degree to 1 and raise ulysses_degree."
    )


def head_shards(heads: int, axis: Axis) -> list[int]:
    """Count the heads that each Ulysses rank gets, by its share."""
    ends = edges(heads, axis.size, axis.shares)
    return [end - start for start, end in zip(ends, ends[1:])]


def scatter_heads(tensors: Sequence[Tensor], lengths: list[int], axis: Axis) -> Tensor:
    """Turn token shards into head shards by one packed all-to-all: several (B, H, own tokens, D) -> (kinds,
    B, own heads, all tokens, D). ``lengths``: tokens of each Ulysses rank.

    Tokens are the slowest on the wire, so what comes from all ranks is in order, and is not copied again.
    """
    batch, heads, tokens, size = tensors[0].shape
    kinds = len(tensors)
    shards = head_shards(heads, axis)
    row = kinds * batch * size  # numbers of a token and head
    sent = [tokens * shard * row for shard in shards]
    flat = tensors[0].new_empty(sum(sent))
    for shard, heads_of_rank in _runs(shards):
        first = sum(shards[: heads_of_rank.start])
        last = first + shard * len(heads_of_rank)
        buffer = flat[tokens * first * row : tokens * last * row]
        buffer = buffer.view(len(heads_of_rank), tokens, kinds, batch, shard, size)
        for kind, tensor in enumerate(tensors):
            cut = tensor[:, first:last].unflatten(1, (-1, shard))
            buffer[:, :, kind] = cut.permute(1, 3, 0, 2, 4)
    own = shards[axis.rank]
    received = exchange(flat, sent, [length * own * row for length in lengths], axis, "ulysses")
    return received.view(sum(lengths), kinds, batch, own, size).permute(1, 2, 3, 0, 4)


def _runs(shards: list[int]) -> list[tuple[int, range]]:
    """Return (heads, ranks) of consecutive Ulysses ranks that have equally many heads, and some."""
    found: list[tuple[int, range]] = []
    for rank, shard in enumerate(shards):
        if found and found[-1][0] == shard:
            found[-1] = shard, range(found[-1][1].start, rank + 1)
        elif shard:
            found.append((shard, range(rank, rank + 1)))
    return found


def gather_heads(out: Tensor, heads: int, lengths: list[int], axis: Axis) -> Tensor:
    """Undo scatter_heads: (B, own heads, all tokens, D) -> (B, H, own tokens, D), whose heads lie next to
    each other in memory, as the projection after it takes them."""
    batch, own, _, size = out.shape
    tokens = lengths[axis.rank]
    sent = [length * batch * own * size for length in lengths]
    sizes = [tokens * batch * shard * size for shard in head_shards(heads, axis)]
    flat = out.permute(2, 0, 1, 3).reshape(-1)
    received = exchange(flat, sent, sizes, axis, "ulysses").split(sizes)
    chunks = [chunk.view(tokens, batch, -1, size) for chunk in received if chunk.numel()]
    whole = torch.cat(chunks, dim=2) if chunks else out.new_empty(tokens, batch, heads, size)
    return whole.permute(1, 2, 0, 3)


def ring_attend(
    kernel: str,
    q: Tensor,
    kv: Tensor,
    lengths: list[int],
    axis: Axis,
    masks: Sequence[Tensor | None] | None,
    scale: float | None,
) -> Tensor:
    """Attend with own queries to the keys and values of every ring rank, which travel in one buffer a hop.

    q (B, H, S, D); kv (2, B, H, own tokens, D); ``lengths[i]`` tokens on ring rank i; ``masks[i]`` for the
    keys of rank i, or None. Returns (B, H, S, D).
    """
    # here: it brings every kernel package that is installed
    from yunchang.ring.utils import RingComm, update_out_and_lse

    assert axis.group is not None, "a ring has several ranks"
    ring = RingComm(axis.group)
    out = lse = incoming = None
    kv = kv.contiguous()
    for hop in range(axis.size):
        source = (axis.rank - hop) % axis.size
        if hop + 1 < axis.size:
            incoming = kv.new_empty((*kv.shape[:3], lengths[source - 1], kv.shape[4]))
            ring.send_recv(kv, incoming)
            ring.commit()
            count("ring", kv)
        if lengths[source] and q.shape[2]:
            block, block_lse = attend_lse(kernel, q, kv[0], kv[1], masks[source] if masks else None, scale)
            out, lse = update_out_and_lse(out, lse, block.transpose(1, 2), block_lse)
        if hop + 1 < axis.size:
            with WAITING:
                ring.wait()
            assert incoming is not None, "made in this hop"
            kv = incoming
    return q if out is None else out.transpose(1, 2).to(q.dtype)
