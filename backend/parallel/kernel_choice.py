"""Which attention kernel can be chosen for a model: what stands against one is refused before it runs."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from functools import cache

import torch

from ..errors import reason
from ..hardware.gpu_kernels import Capability
from .kernel_table import HALF, KERNELS, MIN_APPROXIMATE_KEYS, Kernel, kernel_of


@cache
def import_error(module: str) -> str:
    """Return why ``module`` cannot be imported; "" where it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a wheel built for another torch raises what it likes
        return f"{type(error).__name__}: {reason(error)}"
    return ""


def why_unavailable(
    name: str,
    device: str,
    dtype: torch.dtype,
    head_size: int = 0,
    capabilities: Iterable[Capability] = (),
    ring: bool = False,
) -> str | None:
    """Say why kernel ``name`` cannot run here, as one sentence; None where it can. ``head_size``: of heads.
    ``capabilities``: of the ranks' GPUs. ``ring``: keys and values travel around a ring."""
    kernel = kernel_of(name)
    if kernel.call is None:
        return None
    objection = _not_able(name, kernel, device, dtype, head_size, set(capabilities), ring)
    return objection or _not_active(name, kernel) or _not_importable(name, kernel)


def _not_able(name, kernel, device, dtype, head_size, capabilities, ring) -> str | None:
    if device != "cuda":
        return (
            f"attention is {name}, which runs on CUDA GPUs only, and this backend runs on the {device}; "
            f"set attention to auto."
        )
    if torch.version.hip and not kernel.rocm:
        return (
            f"attention is {name}, which has kernels for NVIDIA GPUs only, and torch {torch.__version__} is "
            f"for AMD's; set attention to auto."
        )
    if dtype not in HALF:
        return (
            f"attention is {name}, which needs bf16 or fp16 weights, and the model is {dtype}; set "
            f"weight_dtype to bf16 or attention to auto."
        )
    if head_size and not kernel.has_head(head_size):
        return (
            f"attention is {name}, which has kernels for {kernel.heads_in_words}, and this model's have "
            f"{head_size}; set attention to auto."
        )
    unknown = sorted(gpu for gpu in capabilities if not kernel.has_gpu(gpu))
    if unknown:
        gpus = ", ".join(f"{major}.{minor}" for major, minor in unknown)
        return (
            f"attention is {name}, which has kernels for GPUs of compute capability {kernel.gpus_in_words}, "
            f"and there are GPUs of {gpus}; set attention to auto."
        )
    if ring and not kernel.lse:
        able = ", ".join(other for other, row in KERNELS.items() if row.lse)
        return (
            f"attention is {name}, which does not return the log-sum-exp by which rings merge, and "
            f"ring_degree is above 1; set attention to one of {able}, or ring_degree to 1."
        )
    return None


def _not_active(name: str, kernel: Kernel) -> str | None:
    known = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
    if not kernel.torch_impl or kernel.torch_impl in known:
        return None
    return (
        f"attention is {name}, which torch {torch.__version__} cannot activate (it knows "
        f"{', '.join(known) or 'none'}); install a newer torch or set attention to auto."
    )


def _not_importable(name: str, kernel: Kernel) -> str | None:
    if not kernel.module:
        return None
    parent = kernel.module.partition(".")[0]
    if importlib.util.find_spec(parent) is None:
        return (
            f"attention is {name}, but the package {kernel.module} is not installed; {kernel.install}, or "
            f"set attention to auto."
        )
    error = import_error(kernel.module)
    function = getattr(sys.modules.get(kernel.module), kernel.function, None)
    if not error and function is not None:
        return _older(name, kernel, function)
    error = error or f"it has no {kernel.function}"
    return (
        f"attention is {name}, but the package {kernel.module} cannot be imported ({error}); install one "
        f"that was built for torch {torch.__version__}, or set attention to auto."
    )


def _older(name: str, kernel: Kernel, function: Callable) -> str | None:
    if not kernel.parameter or kernel.parameter in inspect.signature(function).parameters:
        return None
    return (
        f"attention is {name}, but the package {kernel.module} here is {kernel.older}; {kernel.build}, or "
        f"set attention to auto."
    )


def explained(
    name: str,
    device: str,
    dtype: torch.dtype,
    head_size: int,
    capabilities: Iterable[Capability],
    ring: bool,
) -> str:
    """Say which kernel computes the attention of a model and why, for the node; no package is imported."""
    kernel = kernel_of(name)
    against = kernel.call and _not_able(name, kernel, device, dtype, head_size, set(capabilities), ring)
    if against:
        return against
    if kernel.call is None:
        where = "on the CPU" if device != "cuda" else "for each call as torch's own rules say"
        return f"attention {name}: {kernel.what}, exact, {where}"
    kind = "exact" if kernel.exact else "approximate"
    merged = ", whose log-sum-exp the ring merges by" if ring else ""
    keys = "keys in a hop of the ring" if ring else "keys"
    few = "" if kernel.exact else f" or fewer than {MIN_APPROXIMATE_KEYS:,} {keys}"
    return f"attention {name}: {kernel.what}, {kind}{merged}; torch's own where there is a mask{few}"
