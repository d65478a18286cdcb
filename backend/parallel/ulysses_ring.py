"""Unified sequence parallelism: DeepSpeed-Ulysses (arXiv 2309.14509) x ring attention (arXiv 2310.01889), as
in USP (arXiv 2405.07719).

Token counts and heads may be uneven. The ring's transfer and its merge by log-sum-exp are yunchang's.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from .attention_kernels import attend_lse, import_error
from .comm import all_to_all, count
from .mesh import Axis
from .sequence import Span

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
    """Count the heads that each Ulysses rank gets; sizes differ by at most one."""
    return [len(Span(0, heads).shard(i, axis.size)) for i in range(axis.size)]


def scatter_heads(qkv: Tensor, lengths: list[int], axis: Axis) -> Tensor:
    """Turn token shards into head shards by one packed all-to-all: (3, B, H, own tokens, D) -> (3, B, own
    heads, all tokens, D). ``lengths``: tokens of each Ulysses rank."""
    kinds, batch, heads, _, size = qkv.shape
    shards = qkv.split(head_shards(heads, axis), dim=2)
    own = shards[axis.rank].shape[2]
    shapes = [(kinds, batch, own, length, size) for length in lengths]
    received = all_to_all(list(shards), shapes, axis, "ulysses")
    return torch.cat(received, dim=3)


def gather_heads(out: Tensor, heads: int, lengths: list[int], axis: Axis) -> Tensor:
    """Undo scatter_heads: (B, own heads, all tokens, D) -> (B, H, own tokens, D)."""
    batch, _, _, size = out.shape
    own = lengths[axis.rank]
    shapes = [(batch, shard, own, size) for shard in head_shards(heads, axis)]
    return torch.cat(all_to_all(list(out.split(lengths, dim=2)), shapes, axis, "ulysses"), dim=1)


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
            ring.wait()
            assert incoming is not None, "made in this hop"
            kv = incoming
    return q if out is None else out.transpose(1, 2).to(q.dtype)
