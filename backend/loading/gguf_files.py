"""GGUF files as ComfyUI-GGUF writes them: the original keys, weights in blocks of few bits. Read by blocks
and dequantized as they are read.

Header and types are the gguf package's, dequantization is diffusers' (in float32); both are needed for these
files alone.
"""

import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UnsupportedError, quoted, reason
from .gguf_header import check_gguf
from .header_limits import check_names
from .safetensors_files import ALL, CPU

#: Where a tensor was stored in another shape, for blocks to fit, its own is in the metadata under this name.
SHAPE = "comfy.gguf.orig_shape."
#: Values that are dequantized at once: bounds what dequantization needs besides its result.
CHUNK = 1 << 22
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: its type's name, its shape, its bytes (mapped), and how many values a block has
    and in how many bytes."""

    kind: str
    shape: tuple[int, ...]
    data: Tensor
    block: int
    size: int


class GGUFFile:
    """The tensors of one GGUF file (see files.Weights)."""

    def __init__(self, path: Path):
        if importlib.util.find_spec("gguf") is None:
            raise UnsupportedError(
                f'{path.name} is a GGUF file, which the Python package gguf reads; run: "{sys.executable}" '
                f"-m pip install gguf"
            )
        self.bytes_read = 0
        self.name = path.name
        self.metadata = {}
        self.size = path.stat().st_size
        check_gguf(path)
        self._stored = _open(path)
        check_names(self.name, self._stored)
        self.shapes = {key: stored.shape for key, stored in self._stored.items()}

    def dtype(self, key: str) -> torch.dtype:
        """As in Weights; quantized values are computed in bfloat16 by default."""
        return PLAIN.get(self._stored[key].kind, torch.bfloat16)

    def read(
        self,
        key: str,
        rows: slice = ALL,
        columns: slice = ALL,
        dtype: torch.dtype | None = None,
        device: torch.device = CPU,
    ) -> Tensor:
        """As in Weights; of quantized tensors the blocks that hold these rows and columns."""
        stored = self._stored[key]
        dtype = dtype or self.dtype(key)
        first, last, _ = rows.indices(stored.shape[0]) if stored.shape else (0, 1, 1)
        width = math.prod(stored.shape[1:])
        if columns != ALL and len(stored.shape) == 2 and width % stored.block == 0:
            left, right, _ = columns.indices(width)
            lo = left // stored.block
            hi = -(-right // stored.block)
            blocks = stored.data.view(stored.shape[0], -1, stored.size)[first:last, lo:hi]
            values = self._values(stored, blocks, dtype, device).view(last - first, -1)
            return values[:, left - lo * stored.block : right - lo * stored.block]
        lo = first * width // stored.block
        hi = -(-last * width // stored.block)
        values = self._values(stored, stored.data.view(-1, stored.size)[lo:hi], dtype, device)
        start = first * width - lo * stored.block
        values = (
            values[start : start + (last - first) * width].view(last - first, *stored.shape[1:])
            if stored.shape
            else values.view(())
        )
        return values if columns == ALL else values[:, columns]

    def _values(self, stored: Stored, blocks: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.bytes_read += blocks.numel()
        blocks = blocks.reshape(-1, stored.size).to(device)
        if stored.kind in PLAIN:
            return blocks.view(PLAIN[stored.kind]).reshape(-1).to(dtype)
        values = torch.empty(len(blocks) * stored.block, dtype=dtype, device=device)
        for into, chunk in zip(values.split(CHUNK), blocks.split(CHUNK // stored.block)):
            into.copy_(_dequantize(stored, chunk).view(-1))
        return values


def _dequantize(stored: Stored, blocks: Tensor) -> Tensor:
    import gguf
    from diffusers.quantizers.gguf.utils import dequantize_functions

    return dequantize_functions[gguf.GGMLQuantizationType[stored.kind]](
        blocks, stored.block, stored.size, torch.float32
    )


def _open(path: Path) -> dict[str, Stored]:
    import gguf
    from diffusers.quantizers.gguf.utils import dequantize_functions

    try:
        reader = gguf.GGUFReader(
            path, "c"
        )  # private, so that torch takes it for writable; pages that nobody writes stay shared
        shapes = {
            name.removeprefix(SHAPE): tuple(field.contents())
            for name, field in reader.fields.items()
            if name.startswith(SHAPE)
        }
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        raise UnsupportedError(
            f"{path.name} cannot be read as GGUF ({reason(error)}); it is truncated or no GGUF file: "
            f"download it again."
        ) from None
    found = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind not in PLAIN and tensor.tensor_type not in dequantize_functions:
            known = ", ".join(
                [*PLAIN, *(each.name for each in dequantize_functions if each.name not in PLAIN)]
            )
            raise UnsupportedError(
                f"{path.name}: the tensor {quoted(tensor.name)} is stored as {kind}, which is not supported; "
                f"supported are {known}. Use another file of this model."
            )
        shape = shapes.get(tensor.name, tuple(reversed(tensor.shape.tolist())))
        if math.prod(shape) != tensor.n_elements or any(side < 0 for side in shape):
            raise UnsupportedError(
                f"{path.name}: the {SHAPE} of {quoted(tensor.name)} is {quoted(shape)}, but the tensor has "
                f"{tensor.n_elements} values; the file was converted badly: use another one of this model."
            )
        block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        data = torch.from_numpy(reader.data[tensor.data_offset : tensor.data_offset + tensor.n_bytes])
        found[tensor.name] = Stored(kind, shape, data, block, size)
    return found
