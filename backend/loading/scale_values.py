"""Checks the scales of a quantized file before any rank reads it; rank 0 alone does, as of LoRAs."""

import torch

from ..errors import UnsupportedError, quoted
from .checkpoint import Checkpoint
from .lora_validation import largest
from .quantized import ScaledFiles
from .quantized_layers import Layer

#: The exponent of E8M0 that stands for NaN.
MOST_E8M0 = 255


def check_scales(checkpoint: Checkpoint):
    """Refuse a scale that is NaN or infinite; nothing else is read. The scales of GGUF files are inside their
    blocks, and are looked at as these are read (gguf_files.py), not the whole file twice. Raises
    UnsupportedError."""
    files = checkpoint.files
    if not isinstance(files, ScaledFiles):
        return
    for name, layer in files.layers.items():
        if name not in checkpoint.read_keys:  # of a text encoder beside it
            continue
        for leaf in (*layer.format.leaves, layer.input_scale):
            key = f"{layer.name}.{leaf}"
            if leaf and key in files.files.shapes and not _is_finite(files, layer, leaf):
                raise UnsupportedError(
                    f"{checkpoint.name}: the scale {quoted(key)} holds NaN or infinity, and so would every "
                    f"image; download the file again, or use another one of this model."
                )


def _is_finite(files: ScaledFiles, layer: Layer, leaf: str) -> bool:
    values = files.files.read(f"{layer.name}.{leaf}")
    if values.dtype == torch.uint8:  # block scales that are stored as bytes
        if layer.format.short == "mxfp8":  # exponents, of which the last stands for NaN
            return int(values.max()) < MOST_E8M0
        values = values.view(torch.float8_e4m3fn)
    return largest(values) < float("inf")
