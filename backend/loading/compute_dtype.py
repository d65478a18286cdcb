"""Which type a model computes in where the user does not choose one: ComfyUI's rule (unet_dtype and
unet_manual_cast of comfy.model_management), with the types that its comfy.supported_models lists."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedError
from ..hardware.gpu_kernels import Capability
from ..protocol.load_choices import WEIGHT_DTYPES
from ..quantization.formats import PLAIN_FLOAT8

if TYPE_CHECKING:
    from .checkpoint import Checkpoint  # which imports diffusers; a probe does not need it

#: Name -> type, of load_choices.WEIGHT_DTYPES but for default.
NAMED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Type -> the least compute capability of an NVIDIA GPU with fast products in it.
MIN_CAPABILITY = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}


def compute_dtype(
    stored: torch.dtype | None, listed: Sequence[torch.dtype], able: Collection[torch.dtype]
) -> torch.dtype:
    """Choose the compute type: ``stored`` float16 where it is usable, else the first usable, else float32.

    stored: type of most of the file's values; None: quantized. listed: half precisions that the family bears,
    preferred first (Build.dtypes). able: those with fast products on every rank's device.
    """
    usable = [dtype for dtype in listed if dtype in able]
    if stored == torch.float16 and stored in usable:
        return stored
    return usable[0] if usable else torch.float32


def fast_dtypes(device: torch.device, capability: Capability | None) -> tuple[torch.dtype, ...]:
    """Return half precisions with fast products; ``capability``: the least of the ranks' NVIDIA GPUs, None
    where there are none. On CPUs there are none, on AMD's GPUs both."""
    if device.type != "cuda":
        return ()
    return tuple(each for each, least in MIN_CAPABILITY.items() if capability is None or capability >= least)


def chosen_dtype(
    name: str, checkpoint: Checkpoint, device: torch.device, capability: Capability | None
) -> torch.dtype:
    """Return the type that ``weight_dtype`` names, or the default. Raises UnsupportedError for another."""
    if name == "default":
        return default_dtype(checkpoint, device, capability)
    if name not in NAMED:
        raise UnsupportedError(f"weight_dtype is {name!r:.100}; choose {', '.join(WEIGHT_DTYPES)}.")
    return NAMED[name]


def default_dtype(checkpoint: Checkpoint, device: torch.device, capability: Capability | None) -> torch.dtype:
    """Return the type in which ``checkpoint`` is computed on ``device`` by default."""
    found = (checkpoint.files.quantization(key) for key in checkpoint.read_keys)
    is_quantized = any(each is not None and each.format is not PLAIN_FLOAT8 for each in found)
    stored = None if is_quantized else checkpoint.dtype
    return compute_dtype(stored, checkpoint.family.build.dtypes, fast_dtypes(device, capability))
