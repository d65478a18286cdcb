"""Unified sequence parallelism: DeepSpeed-Ulysses (arXiv 2309.14509) x ring attention (arXiv 2310.01889), as
in USP (arXiv 2405.07719).

Rows and heads may be uneven. The ring's transfer and its merge by log-sum-exp are yunchang's.
"""

import torch
from torch import Tensor
from yunchang.ring.utils import RingComm, update_out_and_lse

from .attention_kernels import attend_lse
from .comm import all_to_all, count
from .mesh import Axis
from .sequence import Span


def head_shards(heads: int, axis: Axis) -> list[int]:
    """Heads that each Ulysses rank gets; sizes differ by at most one."""
    return [len(Span(0, heads).shard(i, axis.size)) for i in range(axis.size)]


def scatter_heads(qkv: Tensor, rows: list[int], axis: Axis) -> Tensor:
    """(3, B, H, own rows, D) -> (3, B, own heads, sum(rows), D): one packed all-to-all; ``rows`` are those of
    each Ulysses rank."""
    kinds, batch, heads, _, size = qkv.shape
    parts = qkv.split(head_shards(heads, axis), dim=2)
    own = parts[axis.rank].shape[2]
    received = all_to_all(list(parts), [(kinds, batch, own, n, size) for n in rows], axis, "ulysses")
    return torch.cat(received, dim=3)


def gather_heads(out: Tensor, heads: int, rows: list[int], axis: Axis) -> Tensor:
    """(B, own heads, sum(rows), D) -> (B, H, own rows, D): the way back of scatter_heads."""
    batch, _, _, size = out.shape
    own = rows[axis.rank]
    received = all_to_all(
        list(out.split(rows, dim=2)),
        [(batch, n, own, size) for n in head_shards(heads, axis)],
        axis,
        "ulysses",
    )
    return torch.cat(received, dim=1)


def ring_attend(
    kernel: str,
    q: Tensor,
    kv: Tensor,
    rows: list[int],
    axis: Axis,
    masks: list[Tensor] | None,
    scale: float | None,
) -> Tensor:
    """Attention of own queries to the keys and values of every ring rank, which travel round in one buffer a
    hop.

    q (B, H, S, D); kv (2, B, H, own rows, D); ``rows[i]`` rows on ring rank i; ``masks[i]`` for the keys of
    rank i, or None.
    """
    ring, out, lse = RingComm(axis.group), None, None
    kv = kv.contiguous()
    for hop in range(axis.size):
        source = (axis.rank - hop) % axis.size
        if hop + 1 < axis.size:
            incoming = kv.new_empty((*kv.shape[:3], rows[source - 1], kv.shape[4]))
            ring.send_recv(kv, incoming)
            ring.commit()
            count("ring", kv)
        if rows[source] and q.shape[2]:
            block, block_lse = attend_lse(kernel, q, kv[0], kv[1], masks[source] if masks else None, scale)
            out, lse = update_out_and_lse(out, lse, block.transpose(1, 2), block_lse)
        if hop + 1 < axis.size:
            ring.wait()
            kv = incoming
    return q if out is None else out.transpose(1, 2).to(q.dtype)
