"""GGUF files as ComfyUI-GGUF writes them: the original keys, weights in blocks of few bits that are
dequantized as they are read. Header and types are the gguf package's, dequantization (in float32) diffusers'.
"""

import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import UnsupportedError, quoted, reason
from ...models.key_layout import Shapes
from ...quantization.formats import Quantization
from ...quantization.gguf_blocks import gguf_format, has_finite_scales
from ...quantization.packed import Packed
from ...runtime.install_command import install_command
from ..staging import upload
from .gguf_header import check_gguf
from .header_limits import check_names, unreadable
from .mapped_file import mapped
from .safetensors_files import ALL, CPU, StoredSize

#: Metadata with the own shape of a tensor that is stored in another one, for blocks to fit.
SHAPE = "comfy.gguf.orig_shape."
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: type, shape, mapped bytes; ``block`` values are stored in ``size`` bytes."""

    kind: str
    shape: tuple[int, ...]
    data: Tensor
    block: int
    size: int

    @property
    def has_whole_blocks(self) -> bool:
        """Return whether it is a quantized matrix whose rows are whole blocks."""
        return self.kind not in PLAIN and len(self.shape) == 2 and self.shape[1] % self.block == 0

    @property
    def quantization(self) -> Quantization:
        """Its format, and what the file says of it."""
        return Quantization(gguf_format(self.kind), {"format": self.kind})


class GGUFFile:
    """The tensors of one GGUF file (see safetensors_files.Weights)."""

    def __init__(self, path: Path):
        if importlib.util.find_spec("gguf") is None:
            raise UnsupportedError(
                f"{path.name} is a GGUF file, which the Python package gguf reads; run: "
                f"{install_command(['gguf'])}"
            )
        self.bytes_read = 0
        self.name = path.name
        self.size = path.stat().st_size
        check_gguf(path)
        self._stored, self.metadata = _open(path)
        check_names(self.name, self._stored)
        self.shapes: Shapes = {key: stored.shape for key, stored in self._stored.items()}

    def dtype(self, key: str) -> torch.dtype:
        """Implement Weights.dtype; quantized values are computed in bfloat16 by default."""
        return PLAIN.get(self._stored[key].kind, torch.bfloat16)

    def read(self, key: str, rows=ALL, columns=ALL, dtype: torch.dtype | None = None, device=CPU) -> Tensor:
        """Implement Weights.read; of quantized tensors the blocks that hold these rows and columns."""
        dtype = dtype or self.dtype(key)
        packed = self.packed(key, rows, columns, device)
        if packed is not None:
            return packed.dequantize(dtype)
        stored = self._stored[key]
        first, last, _ = rows.indices(stored.shape[0]) if stored.shape else (0, 1, 1)
        width = math.prod(stored.shape[1:])
        lo = first * width // stored.block
        hi = -(-last * width // stored.block)
        blocks = stored.data.view(-1, stored.size)[lo:hi]
        self._check_scales(key, blocks)
        values = self._values(stored, blocks, dtype, device)
        if not stored.shape:
            return values.view(())
        start = first * width - lo * stored.block
        values = values[start : start + (last - first) * width].view(last - first, *stored.shape[1:])
        # a copy: a view would keep all columns on the device
        return values if columns == ALL else values[:, columns].contiguous()

    def packed(self, key: str, rows=ALL, columns=ALL, device=CPU) -> Packed | None:
        """Implement Weights.packed; None too where rows hold no whole blocks."""
        stored = self._stored[key]
        if not stored.has_whole_blocks:
            return None
        first, last, _ = rows.indices(stored.shape[0])
        left, right, _ = columns.indices(stored.shape[1])
        lo = left // stored.block
        hi = -(-right // stored.block)
        blocks = stored.data.view(stored.shape[0], -1, stored.size)[first:last, lo:hi]
        self.bytes_read += blocks.numel()
        self._check_scales(key, blocks)
        own = range(left - lo * stored.block, right - lo * stored.block)
        values = {"values": upload(blocks.flatten(1), device)}
        return Packed(*stored.quantization, values, (hi - lo) * stored.block, (own,))

    def quantization(self, key: str) -> Quantization | None:
        """Implement Weights.quantization; None too where rows hold no whole blocks."""
        stored = self._stored[key]
        return stored.quantization if stored.has_whole_blocks else None

    def is_plain(self, key: str) -> bool:
        """Implement Weights.is_plain."""
        return self._stored[key].kind in PLAIN

    def stored_sizes(self, key: str, rows: int, columns: Iterable[range]) -> list[StoredSize] | None:
        """Implement Weights.stored_sizes: one tensor, whose scales are in its blocks."""
        stored = self._stored[key]
        if not stored.has_whole_blocks:
            return None
        blocks = sum(-(-run.stop // stored.block) - run.start // stored.block for run in columns)
        return [StoredSize(rows, rows * blocks * stored.size)]

    def _check_scales(self, key: str, blocks: Tensor):
        """Refuse blocks that are about to be read, whose scales are inside them. Raises UnsupportedError."""
        kind = self._stored[key].kind
        if not has_finite_scales(kind, blocks.reshape(-1, blocks.shape[-1])):
            raise UnsupportedError(
                f"{self.name}: the {kind} blocks of {quoted(key)} have a scale of NaN or infinity, and so "
                f"would every image; download the file again, or use another one of this model."
            )

    def _values(self, stored: Stored, blocks: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Compute the values of ``blocks`` of a tensor that is plain, or no matrix of whole blocks."""
        self.bytes_read += blocks.numel()
        blocks = upload(blocks.reshape(-1, stored.size), device)
        if stored.kind in PLAIN:
            return blocks.view(PLAIN[stored.kind]).reshape(-1).to(dtype)
        columns = (range(stored.block),)
        packed = Packed(*stored.quantization, {"values": blocks}, stored.block, columns)
        return packed.dequantize(dtype).view(-1)


def _open(path: Path) -> tuple[dict[str, Stored], Mapping[str, str]]:
    """Return the tensors, and the strings of the metadata, which say what those of safetensors say."""
    import gguf
    from diffusers.quantizers.gguf.utils import dequantize_functions

    try:
        reader = gguf.GGUFReader(path, "r")
        with path.open("rb") as file:
            data = mapped(file)
        shapes = {
            name.removeprefix(SHAPE): tuple(int(field.parts[index][0]) for index in field.data)
            for name, field in reader.fields.items()
            if name.startswith(SHAPE)
        }
        strings = {
            name: bytes(field.parts[field.data[0]]).decode(errors="replace")
            for name, field in reader.fields.items()
            if field.types == [gguf.GGUFValueType.STRING]
        }
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        raise unreadable(path.name, kind="GGUF", why=reason(error)) from None
    tensors = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind not in PLAIN and tensor.tensor_type not in dequantize_functions:
            known = dict.fromkeys([*PLAIN, *(each.name for each in dequantize_functions)])
            raise UnsupportedError(
                f"{path.name}: the tensor {quoted(tensor.name)} is stored as {kind}, which is not supported; "
                f"supported are {', '.join(known)}. Use another file of this model."
            )
        shape = shapes.get(tensor.name, tuple(reversed(tensor.shape.tolist())))
        if math.prod(shape) != tensor.n_elements or any(side < 0 for side in shape):
            raise UnsupportedError(
                f"{path.name}: the {SHAPE} of {quoted(tensor.name)} is {quoted(shape)}, but the tensor has "
                f"{tensor.n_elements} values; the file was converted badly: use another one of this model."
            )
        block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        own = data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
        tensors[tensor.name] = Stored(kind=kind, shape=shape, data=own, block=block, size=size)
    return tensors, strings
