"""ComfyUI's quantized layers, read as they are stored or as the weights that they stand for."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedError, quoted
from ..models.key_layout import ALWAYS_UNREAD, Shapes
from ..models.patterns import matches
from ..quantization.formats import FLOAT8, PLAIN_FLOAT8, Quantization, scale_group
from ..quantization.packed import Packed
from .mapped_file import DTYPES
from .quantized_layers import (
    BAD_CONVERSION,
    DESCRIPTIONS,
    INPUT_SCALES,
    TILE_BLOCKS,
    TILE_ROWS,
    QuantizedLayer,
    find_layers,
)
from .safetensors_files import ALL, CPU, StoredSize, TensorFiles


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
        tensors = {"values": self._values()}
        for leaf in self.layer.format.leaves:
            if f"{self.layer.name}.{leaf}" in self.files.shapes:
                role, read = READERS[leaf]
                if leaf == "weight_scale" and self.layer.format.tiles:
                    role = "block_scales"
                    read = LayerSlice._block_scales
                tensors[role] = read(self, leaf)
        if self.layer.input_scale:
            tensors["input_scale"] = self._scale(self.layer.input_scale)
        return tensors

    def _values(self) -> Tensor:
        packed = self.layer.format.values_per_element
        whole = self.columns == range(self.layer.columns)
        columns = ALL if whole else slice(self.columns.start // packed, self.columns.stop // packed)
        rows = ALL if self.rows == range(self.layer.shape[0]) else slice(self.rows.start, self.rows.stop)
        return self.files.read(f"{self.layer.name}.weight", rows, columns, device=self.device)

    def _scale(self, leaf: str) -> Tensor:
        """Read one number (1), or one for each row (rows, 1, ...)."""
        key = f"{self.layer.name}.{leaf}"
        if self.files.shapes[key] and self.files.shapes[key][0] == self.layer.shape[0] > 1:
            rows = self.files.read(key, slice(self.rows.start, self.rows.stop), device=self.device)
            return rows.reshape(-1, *[1] * (len(self.layer.shape) - 1))
        return self.files.read(key, device=self.device).reshape(1)

    def _whole(self, leaf: str) -> Tensor:
        return self.files.read(f"{self.layer.name}.{leaf}", device=self.device)

    def _of_columns(self, leaf: str) -> Tensor:
        """Read one number for each column: of the layer's input, which may as well be in its weight."""
        columns = slice(self.columns.start, self.columns.stop)
        return self.files.read(f"{self.layer.name}.{leaf}", columns, device=self.device)

    def _of_groups(self, leaf: str) -> Tensor:
        """Read (rows, groups of columns), as they are stored."""
        size = scale_group(self.layer.settings)
        rows = slice(self.rows.start, self.rows.stop)
        columns = slice(self.columns.start // size, self.columns.stop // size)
        return self.files.read(f"{self.layer.name}.{leaf}", rows, columns, device=self.device)

    def _block_scales(self, leaf: str) -> Tensor:
        """Read (rows, blocks of columns) from cuBLAS' tiles, as bytes."""
        first = self.rows.start // TILE_ROWS * TILE_ROWS
        last = -(-self.rows.stop // TILE_ROWS) * TILE_ROWS
        tiles = self.files.read(f"{self.layer.name}.{leaf}", slice(first, last), device=self.device)
        width = tiles.shape[1]
        tiles = tiles.contiguous().view(torch.uint8)
        tiles = tiles.reshape(-1, width // TILE_BLOCKS, 32, TILE_ROWS // 32, TILE_BLOCKS)
        scales = tiles.permute(0, 3, 2, 1, 4).reshape(-1, width)
        block = self.layer.block
        columns = slice(self.columns.start // block, self.columns.stop // block)
        return scales[self.rows.start - first : self.rows.stop - first, columns].contiguous()


#: Leaf -> the role of its tensor, and how it is read.
READERS = {
    "weight_scale": ("scale", LayerSlice._scale),
    "scale_weight": ("scale", LayerSlice._scale),
    "weight_scale_2": ("tensor_scale", LayerSlice._scale),
    "pre_quant_scale": ("smoothing", LayerSlice._of_columns),
    "weight_s_rel": ("block_scales", LayerSlice._of_groups),
    "weight_s_channel": ("scale", LayerSlice._scale),
    "weight_codebook": ("codebook", LayerSlice._whole),
}


class QuantizedFiles:
    """``files`` with every quantized layer as the weight that it stands for (see safetensors_files.Weights).
    Raises UnsupportedError for a format that is not in FORMATS."""

    def __init__(self, files: TensorFiles):
        self.files = files
        self.metadata = files.metadata
        self.size = files.size
        self.layers = {f"{layer.name}.weight": layer for layer in find_layers(files)}
        scales = {f"{layer.name}.{leaf}" for layer in self.layers.values() for leaf in layer.format.leaves}
        shapes = {
            key: shape
            for key, shape in files.shapes.items()
            if key not in scales and key.rpartition(".")[2] not in (*INPUT_SCALES, *DESCRIPTIONS)
        }
        ours = (key for key in shapes if not matches(key, ALWAYS_UNREAD))  # not of a text encoder, say
        orphan = next((key for key in ours if key.rpartition(".")[2] in READERS), None)
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
        layer = self.layers.get(key)
        if layer is None:
            return self.files.read(key, rows, columns, dtype, device)
        return self._packed(layer, rows, columns, device).dequantize(dtype or self.dtype(key))

    def packed(self, key: str, rows=ALL, columns=ALL, device=CPU) -> Packed | None:
        layer = self._quantized_matrix(key)
        return None if layer is None else self._packed(layer, rows, columns, device)

    def quantization(self, key: str) -> Quantization | None:
        layer = self._quantized_matrix(key)
        return None if layer is None else Quantization(layer.format, layer.settings)

    def is_plain(self, key: str) -> bool:
        return key not in self.layers and self._quantized_matrix(key) is None

    def stored_sizes(self, key: str, rows: int, columns: Iterable[range]) -> list[StoredSize] | None:
        layer = self._quantized_matrix(key)
        if layer is None:
            return None
        width = sum(len(layer.covering(run)) for run in columns)
        sizes = [StoredSize(rows, rows * width // layer.format.values_per_element * self._itemsize(key))]
        for leaf in layer.format.leaves:
            scale = f"{layer.name}.{leaf}"
            shape = self.files.shapes.get(scale)
            if shape is not None:
                length, count = layer.scale_size(leaf, shape, rows, width)
                sizes.append(StoredSize(length, count * self._itemsize(scale)))
        if layer.input_scale:
            sizes.append(StoredSize(1, self._itemsize(f"{layer.name}.{layer.input_scale}")))
        return sizes

    def _itemsize(self, key: str) -> int:
        return DTYPES[self.files.stored_dtype(key)].itemsize

    def _quantized_matrix(self, key: str) -> QuantizedLayer | None:
        """Return the layer of a quantized matrix; float8 without scales is one too."""
        layer = self.layers.get(key)
        if layer is None and self.files.stored_dtype(key) in FLOAT8:
            settings = {"format": FLOAT8[self.files.stored_dtype(key)]}
            layer = QuantizedLayer(
                name=key.removesuffix(".weight"),
                format=PLAIN_FLOAT8,
                settings=settings,
                shape=self.files.shapes[key],
            )
        is_matrix = layer is not None and len(layer.shape) == 2 and key.endswith(".weight")
        return layer if is_matrix else None

    def _packed(self, layer: QuantizedLayer, rows: slice, columns: slice, device: torch.device) -> Packed:
        wanted = range(*columns.indices(layer.columns))
        covering = layer.covering(wanted)
        piece = LayerSlice(
            files=self.files,
            layer=layer,
            rows=range(*rows.indices(layer.shape[0])),
            columns=covering,
            device=device,
        )
        kept = range(wanted.start - covering.start, wanted.stop - covering.start)
        return Packed(
            format=layer.format,
            settings=layer.settings,
            tensors=piece.read(),
            columns=len(covering),
            column_runs=(kept,),
        )
