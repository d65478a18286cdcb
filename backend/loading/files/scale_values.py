"""Checks the scales of a quantized file before any rank reads it; rank 0 alone does, as with LoRAs."""

import torch

from ...errors import UnsupportedError, quoted
from ..checkpoint import Checkpoint
from ..quantized import QuantizedFiles
from ..quantized_layers import QuantizedLayer
from .safetensors_files import largest

#: The exponent of E8M0 that stands for NaN, and the bits of E4M3 besides its sign that do.
NAN_E8M0, NAN_E4M3 = 0xFF, 0x7F


def check_scales(checkpoint: Checkpoint):
    """Refuse a scale that is NaN or infinite; nothing else is read. Those of GGUF files are inside blocks,
    and looked at as these are read (gguf_files.py), not the whole file twice. Raises UnsupportedError."""
    files = checkpoint.files
    if not isinstance(files, QuantizedFiles):
        return
    for name, layer in files.layers.items():
        if name not in checkpoint.read_keys:  # of a text encoder next to it
            continue
        for leaf in layer.leaves:
            key = f"{layer.name}.{leaf}"
            if not _is_finite(files, layer, leaf):
                raise UnsupportedError(
                    f"{checkpoint.name}: the scale {quoted(key)} holds NaN or infinity, and so would every "
                    f"image; download the file again, or use another one of this model."
                )


def _is_finite(files: QuantizedFiles, layer: QuantizedLayer, leaf: str) -> bool:
    """Return whether every value of the scale is a number. Scales of one byte, millions, are read as bits."""
    values = files.files.read(f"{layer.name}.{leaf}")
    if values.element_size() > 1 or not values.numel():
        return largest(values) < float("inf")
    bits = values.view(torch.uint8)
    if layer.format.short == "mxfp8":
        return int(bits.max()) < NAN_E8M0
    # E4M3 has no infinity, and NaN of both signs; quantizers write no negative scale, so one look is enough
    return int(bits.max()) < NAN_E4M3 or not bool((bits & NAN_E4M3 == NAN_E4M3).any())
