"""ComfyUI's quantized layers, read as they are stored or as the weights that they stand for."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedError, quoted
from ..models.key_layout import ALWAYS_UNREAD, Shapes
from ..models.patterns import matches
from ..quantization.formats import FLOAT8, PLAIN_FLOAT8, Quantization
from ..quantization.packed import Packed
from .files.mapped_file import DTYPES
from .files.safetensors_files import ALL, CPU, StoredSize, TensorFiles
from .quantized_layers import (
    BAD_CONVERSION,
    DESCRIPTIONS,
    INPUT_SCALES,
    LEAVES,
    TILE_BLOCKS,
    TILE_ROWS,
    QuantizedLayer,
    find_layers,
)


@dataclass(frozen=True)
class LayerSlice:
    """Rows and columns (whole blocks) of a layer's weight, read to ``device``."""

    files: TensorFiles
    layer: QuantizedLayer
    rows: range
    columns: range
    device: torch.device

    def read(self) -> dict[str, Tensor]:
        """Read what the file stores, by role (quantization/formats.py)."""
        tensors = {"values": self._values()}  # the largest first
        tensors |= {self.layer.leaf(leaf).role: self._scale(leaf) for leaf in self.layer.leaves}
        return tensors

    def _values(self) -> Tensor:
        packed = self.layer.format.values_per_element
        whole = self.columns == range(self.layer.columns)
        columns = ALL if whole else self._groups(packed)
        rows = ALL if self.rows == range(self.layer.shape[0]) else slice(self.rows.start, self.rows.stop)
        return self.files.read(f"{self.layer.name}.weight", rows, columns, device=self.device)

    def _scale(self, name: str) -> Tensor:
        """Read what these rows and columns need of a leaf: one number (1), one for each row (rows, 1, ...),
        each column or each code, or (rows, groups of columns)."""
        leaf = self.layer.leaf(name)
        key = f"{self.layer.name}.{name}"
        rows = slice(self.rows.start, self.rows.stop)
        if leaf.each == "block":
            return self._block_scales(key)
        if leaf.each == "group":
            return self.files.read(key, rows, self._groups(self.layer.group(leaf)), device=self.device)
        if leaf.each == "column":  # of the layer's input, which may as well be in its weight
            return self.files.read(key, self._groups(1), device=self.device)
        if leaf.each == "code":
            return self.files.read(key, device=self.device)
        if self.layer.is_of_rows(self.files.shapes[key]):
            scales = self.files.read(key, rows, device=self.device)
            return scales.reshape(-1, *[1] * (len(self.layer.shape) - 1))
        return self.files.read(key, device=self.device).reshape(1)

    def _block_scales(self, key: str) -> Tensor:
        """Read (rows, blocks of columns) from cuBLAS' tiles, as bytes."""
        first = self.rows.start // TILE_ROWS * TILE_ROWS
        last = -(-self.rows.stop // TILE_ROWS) * TILE_ROWS
        tiles = self.files.read(key, slice(first, last), device=self.device)
        width = tiles.shape[1]
        tiles = tiles.contiguous().view(torch.uint8)
        tiles = tiles.reshape(-1, width // TILE_BLOCKS, 32, TILE_ROWS // 32, TILE_BLOCKS)
        scales = tiles.permute(0, 3, 2, 1, 4).reshape(-1, width)
        columns = self._groups(self.layer.block)
        return scales[self.rows.start - first : self.rows.stop - first, columns].contiguous()

    def _groups(self, size: int) -> slice:
        """Return which groups of so many columns these columns are."""
        return slice(self.columns.start // size, self.columns.stop // size)


class QuantizedFiles:
    """``files`` with every quantized layer as the weight that it stands for (see safetensors_files.Weights).
    Raises UnsupportedError for a format that is not in FORMATS."""

    def __init__(self, files: TensorFiles):
        self.files = files
        self.metadata = files.metadata
        self.size = files.size
        self.layers = {f"{layer.name}.weight": layer for layer in find_layers(files)}
        scales = {f"{layer.name}.{leaf}" for layer in self.layers.values() for leaf in layer.leaves}
        shapes = {
            key: shape
            for key, shape in files.shapes.items()
            if key not in scales and key.rpartition(".")[2] not in (*INPUT_SCALES, *DESCRIPTIONS)
        }
        ours = (key for key in shapes if not matches(key, ALWAYS_UNREAD))  # not of a text encoder, say
        orphan = next((key for key in ours if key.rpartition(".")[2] in LEAVES), None)
        if orphan:
            what = f"{files.name} is quantized with scales ({quoted(orphan)})"
            raise UnsupportedError(f"{what}, but the weight that they belong to is not; {BAD_CONVERSION}.")
        self.shapes: Shapes = shapes | {key: layer.shape for key, layer in self.layers.items()}

    @property
    def bytes_read(self) -> int:
        return self.files.bytes_read

    def dtype(self, key: str) -> torch.dtype:
        """Implement Weights.dtype; quantized values are computed in bfloat16, as ComfyUI does."""
        return torch.bfloat16 if key in self.layers else self.files.dtype(key)

    def read(self, key: str, rows=ALL, columns=ALL, dtype: torch.dtype | None = None, device=CPU) -> Tensor:
        """Implement Weights.read; layers that are quantized are dequantized."""
        layer = self.layers.get(key)
        if layer is None:
            return self.files.read(key, rows, columns, dtype, device)
        return self._packed(layer, rows, columns, device).dequantize(dtype or self.dtype(key))

    def packed(self, key: str, rows=ALL, columns=ALL, device=CPU) -> Packed | None:
        """Implement Weights.packed."""
        layer = self._quantized_matrix(key)
        return None if layer is None else self._packed(layer, rows, columns, device)

    def quantization(self, key: str) -> Quantization | None:
        """Implement Weights.quantization."""
        layer = self._quantized_matrix(key)
        return None if layer is None else Quantization(layer.format, layer.settings)

    def is_plain(self, key: str) -> bool:
        """Implement Weights.is_plain."""
        return key not in self.layers and self._quantized_matrix(key) is None

    def stored_sizes(self, key: str, rows: int, columns: Iterable[range]) -> list[StoredSize] | None:
        """Implement Weights.stored_sizes: the matrix, then its scales."""
        layer = self._quantized_matrix(key)
        if layer is None:
            return None
        width = sum(len(layer.covering(run)) for run in columns)
        sizes = [StoredSize(rows, rows * width // layer.format.values_per_element * self._itemsize(key))]
        for leaf in layer.leaves:
            scale = f"{layer.name}.{leaf}"
            length, count = layer.scale_size(leaf, self.files.shapes[scale], rows, width)
            sizes.append(StoredSize(length, count * self._itemsize(scale)))
        return sizes

    def _itemsize(self, key: str) -> int:
        return DTYPES[self.files.stored_dtype(key)].itemsize

    def _quantized_matrix(self, key: str) -> QuantizedLayer | None:
        """Return the layer of a quantized matrix; float8 without scales is one too."""
        layer = self.layers.get(key)
        if layer is None and self.files.stored_dtype(key) in FLOAT8:
            settings = {"format": FLOAT8[self.files.stored_dtype(key)]}
            name = key.removesuffix(".weight")
            layer = QuantizedLayer(name, PLAIN_FLOAT8, settings, self.files.shapes[key])
        is_matrix = layer is not None and len(layer.shape) == 2 and key.endswith(".weight")
        return layer if is_matrix else None

    def _packed(self, layer: QuantizedLayer, rows: slice, columns: slice, device: torch.device) -> Packed:
        wanted = range(*columns.indices(layer.columns))
        covering = layer.covering(wanted)
        own_rows = range(*rows.indices(layer.shape[0]))
        tensors = LayerSlice(self.files, layer, own_rows, covering, device).read()
        own = range(wanted.start - covering.start, wanted.stop - covering.start)
        return Packed(layer.format, layer.settings, tensors, len(covering), (own,))
