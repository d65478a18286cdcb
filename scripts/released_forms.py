"""Headers of released files for the page docs/memory.md, and other forms of the same models, derived from
them by the rule of each format. No data: names, shapes and dtypes.

A form quantizes the matrices of linear layers in the blocks, as published files do; the rest stays as it is.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]
import diffusers
import torch
from accelerate import init_empty_weights
from headers import HeaderFiles, fold, opened, released, unfold

from backend.loading.checkpoint import Checkpoint
from backend.loading.files.gguf_files import GGUFFile, Stored
from backend.loading.files.safetensors_files import TensorFiles
from backend.loading.quantized import QuantizedFiles
from backend.loading.recognition import check_complete, recognise
from backend.models.key_layout import Shapes

#: Key -> (dtype, shape).
Tensors = dict[str, tuple[str, list[int]]]
#: Weights of linear layers in blocks.
MATRIX = re.compile(r"(^|\.)\w*(blocks|layers)\.\d+\..*\.weight$")
#: Smaller sides are those of norms and gates, which published files leave as they are.
MIN_SIDE = 256
#: Group size of ConvRot.
ROTATED = 256


@dataclass(frozen=True)
class File:
    """A line of the page. header: in tests/headers/released.json.gz, or a class of diffusers, whose defaults
    are the released model's. form: how it is derived from that; empty: it is that file itself. image, text:
    tokens of a typical request."""

    model: str
    form: str
    header: str
    image: int = 4096
    text: int = 512


class HeaderGGUF(GGUFFile):
    """A GGUF file of which the header alone is there."""

    def __init__(self, name: str, tensors: Tensors):
        import gguf

        self.name = name
        self.size = self.bytes_read = 0
        self.metadata: Mapping[str, str] = {}
        none = torch.empty(0)
        self._stored = {
            key: Stored(kind, tuple(shape), none, *gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]])
            for key, (kind, shape) in tensors.items()
        }
        self.shapes: Shapes = {key: stored.shape for key, stored in self._stored.items()}


def is_matrix(key: str, shape: list[int]) -> bool:
    """Does a form quantize this tensor?"""
    return bool(MATRIX.search(key)) and len(shape) == 2 and min(shape) >= MIN_SIDE


def fp8(tensors: Tensors, settings: dict[str, str]) -> Tensors:
    """Scaled fp8: E4M3 values under one scale, with the scale of inputs."""
    quantized = dict(tensors)
    for key, (_, shape) in tensors.items():
        if is_matrix(key, shape):
            layer = key.removesuffix(".weight")
            quantized |= {key: ("F8_E4M3", shape), f"{layer}.weight_scale": ("F32", [])}
            _describe(quantized, settings, layer, {"format": "float8_e4m3fn"})
    return quantized


def int8(tensors: Tensors, settings: dict[str, str]) -> Tensors:
    """int8 with a scale for each row; rotated (ConvRot) where groups divide the rows."""
    quantized = dict(tensors)
    for key, (_, shape) in tensors.items():
        if is_matrix(key, shape):
            layer = key.removesuffix(".weight")
            quantized |= {key: ("I8", shape), f"{layer}.weight_scale": ("F32", [shape[0], 1])}
            rotation = {"convrot": True, "convrot_groupsize": ROTATED} if shape[1] % ROTATED == 0 else {}
            _describe(quantized, settings, layer, {"format": "int8_tensorwise", **rotation})
    return quantized


def _describe(quantized: Tensors, settings: dict[str, str], layer: str, description: dict):
    text = json.dumps(description)
    settings[f"{layer}.comfy_quant"] = text
    quantized[f"{layer}.comfy_quant"] = ("U8", [len(text)])


def gguf_tensors(tensors: Tensors, kind: str) -> Tensors:
    """Blocks of ``kind`` where they divide the rows, else F16; vectors in F32 (as ComfyUI-GGUF converts)."""
    import gguf

    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    quantized: Tensors = {}
    for key, (_, shape) in tensors.items():
        fits = is_matrix(key, shape) and shape[1] % block == 0
        quantized[key] = (kind if fits else "F16" if len(shape) > 1 else "F32", shape)
    return quantized


#: Form of a safetensors file -> what makes it; other forms are types of GGUF.
FORMS: dict[str, Callable[[Tensors, dict[str, str]], Tensors]] = {"fp8 scaled": fp8, "int8 ConvRot": int8}


@lru_cache(maxsize=8)
def checkpoint_of(file: File) -> Checkpoint:
    """Open the file of a line by its header: that of earlier calls, so nobody changes it. Raises
    UnsupportedError."""
    if file.header in released() and not file.form:
        return opened(file.header)
    tensors = tensors_of(file.header)
    if file.form in FORMS or not file.form:
        settings: dict[str, str] = {}
        made = FORMS[file.form](tensors, settings) if file.form else tensors
        header = {"tensors": fold(made), "metadata": {}, "data": settings}
        files = QuantizedFiles(cast(TensorFiles, HeaderFiles(file.model, header)))
    else:
        files = HeaderGGUF(file.model, gguf_tensors(tensors, file.form))
    checkpoint = recognise(file.model, files)
    check_complete(checkpoint)
    return checkpoint


def tensors_of(header: str) -> Tensors:
    """Return the tensors of a released file, or of a class of diffusers with its defaults."""
    if header in released():
        return unfold(released()[header]["tensors"])
    with init_empty_weights():
        transformer = getattr(diffusers, header)()
    return {name: ("BF16", list(value.shape)) for name, value in transformer.state_dict().items()}
