"""Attention with fewer heads of keys and values than of queries."""

import torch.nn.functional as F
from torch import Tensor

#: What the attention of a request takes the place of.
SDPA = F.scaled_dot_product_attention


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attend from heads (B, H, S, D) of queries to grouped heads of keys and values. The attention of a
    request gets these as they are: repeated they would travel, and wait in buffers, several times as large.
    torch's own gets them repeated, as diffusers gives them: few of its kernels take groups."""
    attention = F.scaled_dot_product_attention
    groups = query.shape[1] // key.shape[1]
    if attention is SDPA and groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        groups = 1
    return attention(query, key, value, mask, scale=scale, enable_gqa=groups > 1)
