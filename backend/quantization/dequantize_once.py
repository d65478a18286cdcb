"""Dequantizes weights once in a request, and not for every product, as far as memory is spare.

A weight-only product dequantizes its weight for each patch of each step, to the same values. So they stay
until the request ends.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import attrgetter

import torch

from ..hardware.device_memory import is_out_of_memory
from .packed_weight import PackedWeight

#: Values between the beginnings of two weights are a multiple of this: products read fastest from there.
ALIGNED = 128


@contextmanager
def dequantized_once(weights: Iterable[PackedWeight], spare: int) -> Iterator[int]:
    """Have as many of ``weights`` as fit into ``spare`` bytes stay dequantized from their first product on,
    with the same bits. Yield the bytes that they take: fewer where memory runs out."""
    chosen = _chosen(weights, spare)
    try:
        yield _place(chosen)
    finally:
        for weight in chosen:
            weight.stay(None)


def _chosen(weights: Iterable[PackedWeight], spare: int) -> list[PackedWeight]:
    """Return those that take longest to dequantize, for their size, as long as there is room."""
    chosen = []
    for weight in sorted(weights, key=attrgetter("effort.moved"), reverse=True):
        size = _aligned_values(weight) * weight.dtype.itemsize
        if size <= spare:
            chosen.append(weight)
            spare -= size
    return chosen


def _place(chosen: Sequence[PackedWeight]) -> int:
    """Give each its part of one allocation for all of a type on a device; return the bytes of all."""
    kinds = dict.fromkeys((weight.device, weight.dtype) for weight in chosen)
    size = 0
    try:
        for device, dtype in kinds:
            own = [weight for weight in chosen if (weight.device, weight.dtype) == (device, dtype)]
            *starts, total = accumulate(map(_aligned_values, own), initial=0)
            memory = torch.empty(total, device=device, dtype=dtype)
            for weight, start in zip(own, starts):
                weight.stay(memory[start : start + weight.shape.numel()].view(weight.shape))
            size += memory.nbytes
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return size


def _aligned_values(weight: PackedWeight) -> int:
    return -(-weight.shape.numel() // ALIGNED) * ALIGNED
