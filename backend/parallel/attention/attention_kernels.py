"""Local attention: (B, H, S, D) in and out, by the kernel that kernel_table.py has for a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...runtime import opaque_ops
from ...runtime.torch_version import has_torch
from .kernel_table import HALF, SDPA, fits, flash_of_torch, kernel_of, whole_heads

aten = torch.ops.aten
#: Rows of a mask begin at multiples of so many numbers for the memory-efficient kernel.
ALIGNMENT = 8
#: torch whose CPU kernel takes grouped keys and values (pytorch/pytorch#157893).
CPU_GROUPS = (2, 9)
#: The log-sum-exp of no key: far below any other. Of -inf, which it is, differences would be NaN.
NOTHING = -1e30
#: Compute capability from which NVIDIA's GPUs have flash attention and bfloat16.
AMPERE = (8, 0)
#: Most features of a head for torch's flash kernel.
MAX_FLASH_HEAD = 256
#: Devices on which torch's flash kernel was tried and failed.
WITHOUT_FLASH: set[torch.device] = set()
#: Torch's kernels in words.
IN_WORDS = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN's",
    SDPBackend.MATH: "the plain one",
}
#: What attends with a mask in a hop of a ring.
MASKED_HOPS = SDPBackend.EFFICIENT_ATTENTION
#: Tokens and heads of the call that torch is asked about; its choice depends on neither.
ASKED = 200, 2
#: Torch's kernels whose place an activated one (kernel_table.activated) does not take.
NOT_FLASH = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Compute softmax(q kᵀ · scale + mask) v, (B, H, S, D); what ``kernel`` cannot compute goes to SDPA."""
    kernel_entry = kernel_of(kernel)
    if kernel_entry.call is not None and fits(kernel, q, k, masked=mask is not None, lse=False):
        return kernel_entry.call(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, False)[0]
    if kernel_entry.torch_impl and mask is None:
        k, v = whole_heads(q, k, v)
        with sdpa_kernel(NOT_FLASH):
            return SDPA(q, k, v, scale=scale)
    return sdpa(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *others, enable_gqa: bool = False, **named
) -> Tensor:
    """Call torch's own function. Grouped keys and values are repeated where it would compute all pairs of
    tokens in memory otherwise: of its kernels few take groups."""
    if enable_gqa and not _takes_groups(q, mask):
        k, v = whole_heads(q, k, v)
        enable_gqa = False
    return SDPA(q, k, v, mask, *others, enable_gqa=enable_gqa, **named)


def _takes_groups(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether a fast kernel of torch takes groups: the CPU's, or NVIDIA's flash, without masks."""
    if not q.is_cuda:
        return q.device.type == "meta" or (q.device.type == "cpu" and has_torch(*CPU_GROUPS))
    able = mask is None and q.dtype in HALF and q.shape[-1] <= MAX_FLASH_HEAD
    return able and torch.version.hip is None and has_flash(q.device)


def torchs_choice(device: torch.device, dtype: torch.dtype, head_size: int, ring: bool) -> tuple[str, str]:
    """Return in words which of torch's kernels attends on this device: without a mask, and with one. Nothing
    is computed. ``ring``: in the hops of a ring, which call torch's operators themselves (_lse_kernel)."""
    if ring:
        is_flash = dtype != torch.float32 and has_flash(device)
        kernels = SDPBackend.FLASH_ATTENTION if is_flash else MASKED_HOPS, MASKED_HOPS
    else:
        tokens, heads = ASKED
        q = torch.empty(1, tokens, heads, head_size, dtype=dtype, device=device).transpose(1, 2)
        mask = torch.empty(1, 1, 1, tokens, dtype=torch.bool, device=device)
        kernels = tuple(SDPBackend(aten._fused_sdp_choice(q, q, q, each)) for each in (None, mask))
    plain, masked = (IN_WORDS[kernel] for kernel in kernels)
    return plain, masked


@contextmanager
def instead_of_torch(kernel: str) -> Iterator[None]:
    """Have ``kernel`` compute the attention of a transformer that runs whole, without the attention hook.
    What it cannot compute (masks, wider heads, float32) stays torch's."""
    if kernel_of(kernel).call is None:
        yield
        return

    def attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if attn_mask is not None or is_causal or dropout_p > 0:
            return sdpa(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return attend(kernel, query, key, value, None, scale)

    opaque_ops.RUNNING.attention = attention
    F.scaled_dot_product_attention = opaque_ops.attention
    try:
        yield
    finally:
        opaque_ops.RUNNING.attention = None
        F.scaled_dot_product_attention = SDPA


def attend_lse(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attend and the log-sum-exp (B, H, S) in float32; 0 and NOTHING where all keys are masked."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _lse_kernel(kernel, q, k, v, None if mask is None else _additive(mask, q), scale)
    assert lse is not None, "asked for"
    if mask is None:
        return out, lse.float()
    visible = mask if mask.dtype == torch.bool else mask > float("-inf")
    dead = ~visible.any(-1).expand(q.shape[:3])
    return out.masked_fill(dead[..., None], 0), lse.float().masked_fill(dead, NOTHING)


def _lse_kernel(kernel, q, k, v, mask, scale):
    kernel_entry = kernel_of(kernel)
    if q.is_cuda and kernel_entry.call is not None and fits(kernel, q, k, masked=mask is not None, lse=True):
        return kernel_entry.call(q, *whole_heads(q, k, v), scale, True)
    if not _takes_groups(q, mask):
        k, v = whole_heads(q, k, v)
    if not q.is_cuda:
        if mask is not None:  # this kernel broadcasts over heads alone
            mask = mask.expand(q.shape[0], -1, q.shape[2], -1)
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    if mask is not None or q.dtype == torch.float32 or not has_flash(q.device):
        dtype = q.dtype
        # the efficient kernel has none for bfloat16 before Ampere
        if dtype == torch.bfloat16 and torch.cuda.get_device_capability(q.device) < AMPERE:
            q = q.float()
            k = k.float()
            v = v.float()
            mask = None if mask is None else mask.float()
        mask = None if mask is None else aligned(mask).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention
        out, lse, *_ = efficient(q, k, v, mask, True, 0.0, False, scale=scale)
        return out.to(dtype), lse[..., : q.shape[2]]  # this kernel pads the rows of lse to a multiple of 32
    return flash_of_torch(q, k, v, scale=scale, lse=True)


@cache
def has_flash(device: torch.device) -> bool:
    """Return whether torch's flash kernel runs there: on NVIDIA's GPUs since Ampere, where this torch was
    built with it and kernel_trial.py has not seen it fail."""
    if device in WITHOUT_FLASH or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= AMPERE


def give_up_flash(device: torch.device):
    """Have rings attend by the memory-efficient kernel there, which is as exact."""
    WITHOUT_FLASH.add(device)
    has_flash.cache_clear()


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Turn a boolean mask into 0 / -inf in the dtype of ``like``."""
    if mask.dtype == torch.bool:
        return like.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    return mask.to(like.dtype)


def aligned(bias: Tensor) -> Tensor:
    """Return ``bias`` (..., keys) with rows that begin at multiples of ALIGNMENT numbers, as CUDA's
    memory-efficient kernel wants them ("attn_bias is not correctly aligned"). SDPA itself does the same
    (preprocess_mask in aten's attention.cpp)."""
    starts = (*bias.stride()[:-1], bias.storage_offset())
    if bias.stride(-1) == 1 and not any(start % ALIGNMENT for start in starts):
        return bias
    return F.pad(bias, (0, ALIGNMENT - bias.shape[-1] % ALIGNMENT))[..., : bias.shape[-1]]
