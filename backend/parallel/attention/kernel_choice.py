"""Which attention kernel can be chosen for a model: what stands against one is refused before it runs."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from functools import cache
from typing import get_args

import torch

from ...errors import reason
from ...hardware.gpu_kernels import Capability
from .kernel_table import HALF, KERNELS, MIN_APPROXIMATE_KEYS, TORCH, Kernel, kernel_of

#: The remedy that always helps, as the end of a sentence.
REMEDY = "set attention to auto."


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
    against = _not_able(kernel, device, dtype, head_size, set(capabilities), ring)
    return f"attention is {name}, {against}" if against else why_uncallable(name)


def why_uncallable(name: str) -> str | None:
    """Say why neither torch nor its package can call kernel ``name`` whatever the GPUs and the model, as one
    sentence; None where that is not so. It imports the package."""
    kernel = kernel_of(name)
    against = _not_active(kernel) or _not_importable(kernel)
    return against and f"attention is {name}, {against}"


def _not_able(kernel: Kernel, device, dtype, head_size, capabilities, ring) -> str | None:
    """Return what the table says against it: the rest of the sentence after "attention is NAME,"; None where
    that is nothing."""
    if device != "cuda":
        return f"which runs on CUDA GPUs only, and this backend runs on the {device}; {REMEDY}"
    if torch.version.hip and not kernel.rocm:
        version = torch.__version__
        return f"which has kernels for NVIDIA GPUs only, and torch {version} is for AMD's; {REMEDY}"
    if dtype not in HALF:
        return (
            f"which needs bf16 or fp16 weights, and the model is {dtype}; set weight_dtype to bf16 or "
            f"attention to auto."
        )
    if head_size and not kernel.has_head(head_size):
        return f"which has kernels for {kernel.heads_in_words}, and this model's have {head_size}; {REMEDY}"
    unknown = sorted(gpu for gpu in capabilities if not kernel.has_gpu(gpu))
    if unknown:
        gpus = ", ".join(f"{major}.{minor}" for major, minor in unknown)
        return (
            f"which has kernels for GPUs of compute capability {kernel.gpus_in_words}, and there are GPUs "
            f"of {gpus}; {REMEDY}"
        )
    if ring and not kernel.lse:
        able = ", ".join(other for other, row in KERNELS.items() if row.lse)
        return (
            f"which does not return the log-sum-exp by which rings merge, and ring_degree is above 1; set "
            f"attention to one of {able}, or ring_degree to 1."
        )
    return None


def _not_active(kernel: Kernel) -> str | None:
    """Return why torch does not activate it, as _not_able."""
    known = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
    if not kernel.torch_impl or kernel.torch_impl in known:
        return None
    return (
        f"which torch {torch.__version__} cannot activate (it knows {', '.join(known) or 'none'}); install a "
        f"newer torch or {REMEDY}"
    )


def _not_importable(kernel: Kernel) -> str | None:
    """Return why its package cannot be used, as _not_able."""
    module = kernel.module
    if not module:
        return None
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"but the package {module} is not installed; {kernel.install}, or {REMEDY}"
    error = import_error(module)
    function = getattr(sys.modules.get(module), kernel.function, None)
    if error or function is None:
        error = error or f"it has no {kernel.function}"
        return (
            f"but the package {module} cannot be imported ({error}); install one that was built for torch "
            f"{torch.__version__}, or {REMEDY}"
        )
    if not kernel.parameter and not kernel.results:
        return None
    signature = inspect.signature(function)
    if kernel.parameter and kernel.parameter not in signature.parameters:
        return f"but the package {module} here is {kernel.older}; {kernel.install}, or {REMEDY}"
    results = len(get_args(signature.return_annotation))
    if kernel.results and results > kernel.results:
        return (
            f"but {kernel.function} of {module} returns {results} results, of which torch "
            f"{torch.__version__} takes {kernel.results}; use a newer torch, {kernel.install}, or {REMEDY}"
        )
    return None


def explained(
    name: str,
    device: str,
    dtype: torch.dtype,
    head_size: int,
    capabilities: Iterable[Capability],
    ring: bool,
    torchs: tuple[str, str] | None = None,
) -> str:
    """Say which kernel computes the attention of a model and why, for the node; no package is imported.
    ``torchs``: which of its own kernels torch chooses without a mask and with one, where that is known."""
    kernel = kernel_of(name)
    capabilities = set(capabilities)
    against = kernel.call and _not_able(kernel, device, dtype, head_size, capabilities, ring)
    if against:
        return f"attention is {name}, {against}"
    if kernel.call is None:
        text = f"attention {name}: {kernel.what}, exact, {_torchs_rule(device, torchs)}"
        others = _others(device, dtype, head_size, capabilities, ring) if name != TORCH else ""
        return text + others
    kind = "exact" if kernel.exact else "approximate"
    merged = ", whose log-sum-exp the ring merges by" if ring else ""
    keys = "keys in a hop of the ring" if ring else "keys"
    few = "" if kernel.exact else f" or fewer than {MIN_APPROXIMATE_KEYS:,} {keys}"
    return f"attention {name}: {kernel.what}, {kind}{merged}; torch's own where there is a mask{few}"


def _torchs_rule(device: str, torchs: tuple[str, str] | None) -> str:
    """Say which of torch's kernels that is."""
    if device != "cuda":
        return "on the CPU"
    if torchs is None:
        return "for each call as torch's own rules say"
    plain, masked = torchs
    same = "with a mask too" if plain == masked else f"with a mask {masked}"
    return f"on these GPUs {plain}, {same}"


def _others(device, dtype, head_size, capabilities, ring) -> str:
    """Say which kernels of the table auto leaves, and why, as the end of a text; empty where it has none."""
    able = [
        (name, row.exact)
        for name, row in KERNELS.items()
        if row.call and not _not_able(row, device, dtype, head_size, capabilities, ring)
    ]
    if not able:
        return ""
    listed = ", ".join(name if is_exact else f"{name} (approximate)" for name, is_exact in able)
    why = "auto takes torch's, since none was timed here (scripts/doctor.py --full does)"
    return f"; others for it: {listed}; {why}"
