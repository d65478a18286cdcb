"""Local attention kernels: (B, H, S, D) in and out, chosen by ParallelConfig.attention."""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

#: diffusers' transformers all end in this function (by attribute of torch.nn.functional): the hook replaces
#: it, the kernels keep the original.
SDPA = F.scaled_dot_product_attention
aten = torch.ops.aten
#: Rows of a mask begin at multiples of so many numbers for the memory-efficient kernel.
ALIGNMENT = 8

_PACKAGES = {"flash-attn": "flash_attn", "sage": "sageattention"}


def unavailable(name: str, device: str, dtype: torch.dtype) -> str | None:
    """Say why kernel ``name`` cannot run here, as one sentence; None where it can."""
    package = _PACKAGES.get(name)
    if package is None:
        return None
    if device != "cuda":
        return (
            f"attention is {name}, which runs on CUDA GPUs only, and this backend runs on the {device}; "
            f"set attention to auto."
        )
    if importlib.util.find_spec(package) is None:
        return (
            f"attention is {name}, but the package {package} is not installed; pip install "
            f"{package.replace('_', '-')} or set attention to auto."
        )
    if dtype not in (torch.float16, torch.bfloat16):
        return (
            f"attention is {name}, which needs bf16 or fp16 weights, and the model is {dtype}; set "
            f"weight_dtype to bf16 or attention to auto."
        )
    return None


def attend(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Compute softmax(q kᵀ · scale + mask) v, (B, H, S, D); masked calls go to SDPA."""
    if kernel == "flash-attn" and mask is None:
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]  # optional

        return flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), softmax_scale=scale).transpose(1, 2)
    if kernel == "sage" and mask is None:
        from sageattention import sageattn  # pyright: ignore[reportMissingImports]  # optional

        return sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=scale)
    return SDPA(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def attend_lse(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attend and the log-sum-exp (B, H, S) float32, by which ring attention merges blocks. A query
    whose keys are all masked gets output 0 and lse -inf."""
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _lse_kernel(kernel, q, k, v, None if mask is None else additive(mask, q), scale)
    if mask is None:
        return out, lse.float()
    visible = mask if mask.dtype == torch.bool else mask > float("-inf")
    dead = ~visible.any(-1).expand(q.shape[:3])
    return out.masked_fill(dead[..., None], 0), lse.float().masked_fill(dead, float("-inf"))


def _lse_kernel(kernel, q, k, v, mask, scale):
    if not q.is_cuda:
        if mask is not None:  # this kernel broadcasts over heads alone
            mask = mask.expand(q.shape[0], -1, q.shape[2], -1)
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    if mask is not None or q.dtype == torch.float32:
        mask = None if mask is None else aligned(mask).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention
        out, lse, *_ = efficient(q, k, v, mask, True, 0.0, False, scale=scale)
        return out, lse[..., : q.shape[2]]  # this kernel pads the rows of lse to a multiple of 32
    if kernel == "flash-attn":
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]  # optional

        out, lse, _ = flash_attn_func(
            *(t.transpose(1, 2) for t in (q, k, v)), softmax_scale=scale, return_attn_probs=True
        )
        return out.transpose(1, 2), lse
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, scale=scale)[:2]


def additive(mask: Tensor, like: Tensor) -> Tensor:
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
