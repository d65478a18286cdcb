"""Local attention kernels: (B, H, S, D) in and out, chosen by ParallelConfig.attention."""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import opaque_ops
from ..errors import reason

#: diffusers' transformers all end in this function (by attribute of torch.nn.functional): the hook replaces
#: it, the kernels keep the original.
SDPA = F.scaled_dot_product_attention
aten = torch.ops.aten
#: Rows of a mask begin at multiples of so many numbers for the memory-efficient kernel.
ALIGNMENT = 8

Capability = tuple[int, int]


@dataclass(frozen=True)
class Package:
    """A package of kernels.

    module, install: names for import and pip. head_size: the largest. has_gpu: compute capability -> are
    there kernels for it? gpus: those, for messages.
    """

    module: str
    install: str
    head_size: int
    has_gpu: Callable[[Capability], bool]
    gpus: str


#: What packages compute in.
HALF = (torch.float16, torch.bfloat16)
#: SageAttention 2 (sageattention/core.py, sageattn): kernels by architecture, head sizes padded to 64 or 128.
SAGE_GPUS = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
PACKAGES = {
    "flash-attn": Package("flash_attn", "flash-attn", 256, lambda gpu: gpu >= (8, 0), "8.0 or higher"),
    "sage": Package(
        "sageattention",
        "sageattention",
        128,
        lambda gpu: gpu in SAGE_GPUS,
        ", ".join(f"{major}.{minor}" for major, minor in SAGE_GPUS),
    ),
}


@cache
def import_error(module: str) -> str:
    """Return why ``module`` cannot be imported, "" where it can; a wheel built for another torch raises what
    it likes."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {reason(error)}"
    return ""


def unavailable(
    name: str,
    device: str,
    dtype: torch.dtype,
    head_size: int = 0,
    capabilities: Iterable[Capability] = (),
) -> str | None:
    """Say why kernel ``name`` cannot run here, as one sentence; None where it can.

    ``head_size``: of the model. ``capabilities``: of the ranks' GPUs, (major, minor).
    """
    package = PACKAGES.get(name)
    if package is None:
        return None
    if device != "cuda":
        return (
            f"attention is {name}, which runs on CUDA GPUs only, and this backend runs on the {device}; "
            f"set attention to auto."
        )
    if dtype not in HALF:
        return (
            f"attention is {name}, which needs bf16 or fp16 weights, and the model is {dtype}; set "
            f"weight_dtype to bf16 or attention to auto."
        )
    if head_size > package.head_size:
        return (
            f"attention is {name}, which has kernels for heads of up to {package.head_size} features, and "
            f"this model's have {head_size}; set attention to auto."
        )
    unknown = sorted({gpu for gpu in capabilities if not package.has_gpu(gpu)})
    if unknown:
        found = ", ".join(f"{major}.{minor}" for major, minor in unknown)
        return (
            f"attention is {name}, which has kernels for GPUs of compute capability {package.gpus}, and "
            f"there are GPUs of {found}; set attention to auto."
        )
    return _not_importable(name, package)


def _not_importable(name: str, package: Package) -> str | None:
    if importlib.util.find_spec(package.module) is None:
        return (
            f"attention is {name}, but the package {package.module} is not installed; pip install "
            f"{package.install} or set attention to auto."
        )
    error = import_error(package.module)
    if not error:
        return None
    return (
        f"attention is {name}, but the package {package.module} cannot be imported ({error}); install one "
        f"that was built for torch {torch.__version__}, or set attention to auto."
    )


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


@contextmanager
def instead_of_torch(kernel: str) -> Iterator[None]:
    """Have a package's ``kernel`` compute the attention of a transformer that runs whole, without the
    attention hook. What it has no kernel for (masks, wider heads, float32) stays torch's."""
    if kernel not in PACKAGES:
        yield
        return

    def attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        special = attn_mask is not None or is_causal or dropout_p > 0
        fits = query.shape[-1] <= PACKAGES[kernel].head_size and query.dtype in HALF
        if special or not fits:
            return SDPA(
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
    if kernel == "sage":
        from sageattention import sageattn  # pyright: ignore[reportMissingImports]  # optional

        # natural logarithm, with the mean that it takes off the keys added back
        return sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=scale, return_lse=True)
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
