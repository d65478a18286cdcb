"""How queries, keys, values and outputs of attention travel between the ranks of Ulysses and of a ring
(ParallelConfig.wire): in their own type, or as float8 with a float32 scale for each token and head.

Scales of so few numbers keep an outlier's error in its own head, as the 1 x 128 tiles do in which
DeepSeek-V3 sends activations (arXiv 2412.19437, 3.3). Values and their scale are one row of bytes, so that no
message is added, and collectives that know no float8 carry them.
"""

import torch
from torch import Tensor

from .wire_bytes import FULL, SCALE_BYTES

#: Of the values.
DTYPE = torch.float8_e4m3fn
MAX_FP8 = torch.finfo(DTYPE).max
#: Least scale: below it a float32 would have few digits left, or none.
MIN_SCALE = 1e-30
#: Pieces of its tokens in which a tensor is divided by its scales: each is in float32 for a moment.
PIECES = 2


def pack(x: Tensor, wire: str) -> Tensor:
    """Return (..., tokens, D) as it travels: unchanged, or as bytes (..., tokens, D + 4). A row that holds an
    infinity or no number comes back without any number."""
    if wire == FULL:
        return x
    features = x.shape[-1]
    peak = x.abs().amax(-1, keepdim=True)
    scale = (peak.float() / MAX_FP8).clamp_min(MIN_SCALE)
    # with tokens before heads in memory where x has them so: written as it is read
    order = (*sorted(range(x.ndim - 1), key=x.stride, reverse=True), x.ndim - 1)
    shape = (*x.shape[:-1], features + SCALE_BYTES)
    packed = torch.empty_permuted(shape, order, dtype=torch.uint8, device=x.device)
    values = packed[..., :features].view(DTYPE)
    # dimension -2 is that of tokens
    in_pieces = (each.tensor_split(PIECES, -2) for each in (values, x, scale))
    for piece, number, divisor in zip(*in_pieces):
        piece.copy_(number / divisor)
    packed[..., features:].copy_(scale.view(torch.uint8))
    return packed


def unpack(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return in ``dtype`` what ``pack`` made of it: (..., D)."""
    if x.dtype != torch.uint8:
        return x
    values = x[..., :-SCALE_BYTES].clone().view(DTYPE).to(dtype)  # which holds every float8
    scale = x[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return values.mul_(scale)
