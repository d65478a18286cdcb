"""Stands for torch's attention where a GPU would run it."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from backend.parallel.attention.kernel_table import SDPA


def by_cudnn(q, k, v, *, scale):
    """torch's function where it may choose cuDNN's kernel alone, with a part of what it refuses then
    (can_use_cudnn_attention of its sdp_utils.cpp)."""
    backends = torch.backends.cuda
    assert backends.cudnn_sdp_enabled() and not backends.flash_sdp_enabled()
    assert not backends.mem_efficient_sdp_enabled() and not backends.math_sdp_enabled()
    assert k.shape[2] > 1 and q.numel() and not q.shape[3] % 8 and q.stride(3) == 1
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return SDPA(q, k, v, scale=scale)


def right(q, k, v, scale, lse):
    """A kernel of the table that is right."""
    sums = (q.float() @ k.float().transpose(2, 3) * scale).logsumexp(-1)
    return SDPA(q, k, v, scale=scale), sums if lse else None
