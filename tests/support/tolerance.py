"""How near two results must be that one formula gives through different kernels, and where nothing but
the same bits will do.

No matrix library promises the same bits for other shapes: with more rows, fewer columns or another stride it
picks another kernel, which adds in another order. What is promised is rounding: each product is off by a few
units in the last place of its largest value, and products that follow each other add that up.
"""

import torch
from torch import Tensor

#: Units in the last place that one layer of products may be off.
ULPS = 2


def ulps(found: Tensor, wanted: Tensor) -> float:
    """Largest difference in units in the last place of the largest wanted value (eps x max|wanted|)."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    unit = torch.finfo(wanted.dtype).eps * wanted.abs().max().double()
    return ((found.double() - wanted.double()).abs().max() / unit).item()


def assert_ulps(found: Tensor, wanted: Tensor, depth: int, most: float = ULPS):
    """Hold products of other shapes to rounding: the same shape and type, and no value farther away than
    eps x depth x max|wanted| x ``most``. depth: how many layers, blocks or model calls of blocks, lie one
    behind the other. A row that is stale, missing or another's is off by thousands of times that."""
    off = ulps(found, wanted)
    assert off <= most * depth, f"{off:.1f} units in the last place, at most {most} x {depth} are rounding"


def assert_same_bits(found: Tensor, wanted: Tensor):
    """Hold copies, caches, files and repeats to the last bit: nothing is multiplied, or the same kernel sees
    the same shapes."""
    assert found.dtype == wanted.dtype and found.equal(wanted)
