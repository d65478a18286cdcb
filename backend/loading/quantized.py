"""ComfyUI's quantized layers, values of few bits with their scales, read as the weights that they stand for.

A layer X names its format in the tensor X.comfy_quant (JSON) or in the header's _quantization_metadata; older
files ("scaled fp8") just have X.scale_weight next to float8 values. Values are multiplied by their scales in
ComfyUI's order and precision.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedError, quoted, reason
from ..models.key_layout import PREFIXES, Shapes
from ..quantization.formats import FLOAT8, FORMATS, PLAIN_FLOAT8, Format
from ..quantization.packed import Packed
from .safetensors_files import ALL, CPU, StoredSize, TensorFiles

#: Leaves of a layer besides weight and bias: scales of the weight; of activations, where they are quantized
#: too; what describes formats.
WEIGHT_SCALES = ("weight_scale", "scale_weight", "weight_scale_2", "pre_quant_scale")
INPUT_SCALES = ("input_scale", "scale_input")
DESCRIPTIONS = ("comfy_quant", "scaled_fp8")
#: Formats under whose input_scale ComfyUI quantizes activations.
WITH_INPUT_SCALE = ("float8_e4m3fn", "nvfp4")
#: Block scales are stored in cuBLAS' tiles of 128 rows x 4 blocks.
TILE_ROWS, TILE_BLOCKS = 128, 4
#: The file's name of a dtype -> bytes of a value.
ITEMSIZES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4}
#: End of refusals.
BADLY = "the file was converted badly: use another one of this model"
#: Bytes of a layer's description (a few dozen as published).
MOST_SETTINGS = 4_096


@dataclass(frozen=True)
class Layer:
    """A quantized layer: X of X.weight, its format, what the file says of it (and "scales", how many a matrix
    has), the shape of its weight, and the leaf of the scale of its inputs, if any."""

    name: str
    format: Format
    settings: Mapping
    shape: tuple[int, ...]
    input_scale: str = ""

    @property
    def block(self) -> int:
        """Neighbours in a row that can only be read together."""
        return self.format.block(self.settings)

    @property
    def columns(self) -> int:
        """Columns of a matrix; 1 of what is none."""
        return self.shape[1] if len(self.shape) == 2 else 1

    def covering(self, columns: range) -> range:
        """Return the whole blocks that hold ``columns``."""
        return range(columns.start // self.block * self.block, -(-columns.stop // self.block) * self.block)


@dataclass(frozen=True)
class Piece:
    """Rows and columns (whole blocks) of a layer's weight, read to ``device``."""

    files: TensorFiles
    layer: Layer
    rows: range
    columns: range
    device: torch.device

    def stored(self) -> dict[str, Tensor]:
        """Read what the file stores, by role (quantization/formats.py)."""
        found = {"values": self._values()}
        leaves = {leaf for leaf in WEIGHT_SCALES if f"{self.layer.name}.{leaf}" in self.files.shapes}
        if "weight_scale" in leaves and self.layer.format.is_blocked:
            found["block_scales"] = self._block_scales()
        elif leaves & {"weight_scale", "scale_weight"}:
            found["scale"] = self._scale("scale_weight" if "scale_weight" in leaves else "weight_scale")
        if "weight_scale_2" in leaves:
            found["tensor_scale"] = self._scale("weight_scale_2")
        if "pre_quant_scale" in leaves:  # of the layer's input, which may as well be scaled in the columns
            columns = slice(self.columns.start, self.columns.stop)
            key = f"{self.layer.name}.pre_quant_scale"
            found["smoothing"] = self.files.read(key, columns, device=self.device)
        if self.layer.input_scale:
            found["input_scale"] = self._scale(self.layer.input_scale)
        return found

    def _values(self) -> Tensor:
        packed = self.layer.format.packed
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

    def _block_scales(self) -> Tensor:
        """Read (rows, blocks of columns), as bytes."""
        first = self.rows.start // TILE_ROWS * TILE_ROWS
        last = -(-self.rows.stop // TILE_ROWS) * TILE_ROWS
        tiles = self.files.read(f"{self.layer.name}.weight_scale", slice(first, last), device=self.device)
        width = tiles.shape[1]
        tiles = tiles.contiguous().view(torch.uint8)
        tiles = tiles.reshape(-1, width // TILE_BLOCKS, 32, TILE_ROWS // 32, TILE_BLOCKS)
        scales = tiles.permute(0, 3, 2, 1, 4).reshape(-1, width)
        block = self.layer.block
        columns = slice(self.columns.start // block, self.columns.stop // block)
        return scales[self.rows.start - first : self.rows.stop - first, columns].contiguous()


class ScaledFiles:
    """``files`` with every quantized layer as the weight that it stands for (see safetensors_files.Weights).
    Raises UnsupportedError for a format that is not in FORMATS."""

    def __init__(self, files: TensorFiles):
        self.files = files
        self.metadata = files.metadata
        self.size = files.size
        self.layers = {f"{layer.name}.weight": layer for layer in _layers(files)}
        scales = {f"{layer.name}.{leaf}" for layer in self.layers.values() for leaf in WEIGHT_SCALES}
        shapes = {
            key: shape
            for key, shape in files.shapes.items()
            if key not in scales and key.rpartition(".")[2] not in (*INPUT_SCALES, *DESCRIPTIONS)
        }
        orphan = next((key for key in shapes if key.rpartition(".")[2] in WEIGHT_SCALES), None)
        if orphan:
            what = f"{files.name} is quantized with scales ({quoted(orphan)})"
            raise UnsupportedError(f"{what}, but the weight that they belong to is not; {BADLY}.")
        self.shapes: Shapes = shapes | {key: layer.shape for key, layer in self.layers.items()}

    @property
    def bytes_read(self) -> int:
        return self.files.bytes_read

    def dtype(self, key: str) -> torch.dtype:
        """As in Weights; quantized values are computed in bfloat16, as ComfyUI does."""
        return torch.bfloat16 if key in self.layers else self.files.dtype(key)

    def read(self, key: str, rows=ALL, columns=ALL, dtype: torch.dtype | None = None, device=CPU) -> Tensor:
        """As in Weights."""
        layer = self.layers.get(key)
        if layer is None:
            return self.files.read(key, rows, columns, dtype, device)
        return self._packed(layer, rows, columns, device).dequantize(dtype or self.dtype(key))

    def packed(self, key: str, rows=ALL, columns=ALL, device=CPU) -> Packed | None:
        """As in Weights."""
        layer = self._matrix(key)
        return None if layer is None else self._packed(layer, rows, columns, device)

    def quantization(self, key: str) -> tuple[Format, Mapping] | None:
        """As in Weights."""
        layer = self._matrix(key)
        return None if layer is None else (layer.format, layer.settings)

    def stored_sizes(self, key: str, rows: int, columns: Iterable[range]) -> list[StoredSize] | None:
        """As in Weights."""
        layer = self._matrix(key)
        if layer is None:
            return None
        width = sum(len(layer.covering(run)) for run in columns)
        itemsize = self._itemsize(key)
        found = [StoredSize(rows, rows * width // layer.format.packed * itemsize)]
        for leaf in WEIGHT_SCALES:
            scale = f"{layer.name}.{leaf}"
            shape = self.files.shapes.get(scale)
            if shape is None:
                continue
            length = rows if shape and shape[0] == layer.shape[0] > 1 else 1
            count = length
            if leaf == "weight_scale" and layer.format.is_blocked:
                length = rows
                count = rows * width // layer.block
            elif leaf == "pre_quant_scale":
                length = count = width
            found.append(StoredSize(length, count * self._itemsize(scale)))
        if layer.input_scale:
            found.append(StoredSize(1, self._itemsize(f"{layer.name}.{layer.input_scale}")))
        return found

    def _itemsize(self, key: str) -> int:
        return ITEMSIZES[self.files.stored(key)]

    def _matrix(self, key: str) -> Layer | None:
        """The layer of a quantized matrix; float8 without scales is one too."""
        layer = self.layers.get(key)
        if layer is None and self.files.stored(key) in FLOAT8:
            settings = {"format": FLOAT8[self.files.stored(key)]}
            layer = Layer(key.removesuffix(".weight"), PLAIN_FLOAT8, settings, self.files.shapes[key])
        is_matrix = layer is not None and len(layer.shape) == 2 and key.endswith(".weight")
        return layer if is_matrix else None

    def _packed(self, layer: Layer, rows: slice, columns: slice, device: torch.device) -> Packed:
        wanted = range(*columns.indices(layer.columns))
        covering = layer.covering(wanted)
        piece = Piece(self.files, layer, range(*rows.indices(layer.shape[0])), covering, device)
        kept = range(wanted.start - covering.start, wanted.stop - covering.start)
        return Packed(layer.format, layer.settings, piece.stored(), len(covering), (kept,))


def _layers(files: TensorFiles) -> list[Layer]:
    """Return the quantized layers of ``files``, checked."""
    found = dict(_described_in_header(files))
    marker = next((key for key in files.shapes if key.rpartition(".")[2] == "scaled_fp8"), None)
    # ComfyUI's convention: two numbers in the marker ask for products in full precision
    is_precise = marker is not None and math.prod(files.shapes[marker]) == 2
    for key in files.shapes:
        name, _, leaf = key.rpartition(".")
        weight = f"{name}.weight"
        if leaf == "comfy_quant":
            found[name] = _settings(files, key, _bytes(files, key))
        elif leaf in ("scale_weight", "weight_scale") and name not in found and files.shapes.get(weight):
            if files.stored(weight) in FLOAT8:
                precise = {"full_precision_matrix_mult": True} if is_precise else {}
                found[name] = {"format": FLOAT8[files.stored(weight)], **precise}
            elif leaf == "scale_weight" and marker is not None:
                found[name] = {"format": "scaled plain"}
        elif leaf == "weight_scale_2" and name not in found and files.shapes.get(weight):
            if files.stored(weight) == "U8":
                found[name] = {"format": "nvfp4"}
    return [_checked(files, name, settings) for name, settings in found.items()]


def _bytes(files: TensorFiles, key: str) -> bytes:
    shape = files.shapes[key]
    if math.prod(shape) > MOST_SETTINGS or files.stored(key) != "U8":
        what = f"{files.name}: {quoted(key)} has shape {quoted(shape)} of {files.stored(key)}"
        raise UnsupportedError(f"{what}, and describes a layer in {MOST_SETTINGS:,} bytes at most; {BADLY}.")
    return bytes(files.read(key).flatten().tolist())


def _settings(files: TensorFiles, where: str, text: str | bytes) -> dict:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"{quoted(where)} is no JSON ({reason(error)})"
        raise UnsupportedError(f"{files.name}: {why}; {BADLY}.") from None
    return found if isinstance(found, dict) else {}


def _described_in_header(files: TensorFiles):
    """Yield the layers of the header's _quantization_metadata, whose names may lack the keys' prefix."""
    where = "_quantization_metadata"
    layers = _settings(files, where, files.metadata.get(where, "{}")).get("layers", {})
    for name, settings in (layers if isinstance(layers, dict) else {}).items():
        prefix = next((prefix for prefix in PREFIXES if f"{prefix}{name}.weight" in files.shapes), "")
        yield prefix + name, settings if isinstance(settings, dict) else {}


def _checked(files: TensorFiles, name: str, settings: Mapping) -> Layer:
    kind = settings.get("format")
    stored = files.stored(f"{name}.weight") if f"{name}.weight" in files.shapes else "nothing"
    layer = f"{files.name}: the layer {quoted(name)}"
    if not isinstance(kind, str) or kind not in FORMATS:
        raise UnsupportedError(
            f"{layer} is quantized as {quoted(kind)}, which is not supported; supported are "
            f"{', '.join(FORMATS)} and GGUF. Use another file of this model."
        )
    form = FORMATS[kind]
    if stored not in form.stored:
        raise UnsupportedError(f"{layer} is said to be {kind} but is stored as {stored}; {BADLY}.")
    shapes = {leaf: files.shapes.get(f"{name}.{leaf}") for leaf in WEIGHT_SCALES}
    leaves = {leaf: shape for leaf, shape in shapes.items() if shape is not None}
    if "scale_weight" in leaves:
        leaves.setdefault("weight_scale", leaves["scale_weight"])
    missing = [leaf for leaf in form.needs if leaf not in leaves]
    if missing:
        what = f"{layer} is quantized as {kind} but lacks {', '.join(missing)}"
        raise UnsupportedError(f"{what}; the file is incomplete: download it again.")
    rows, *rest = files.shapes[f"{name}.weight"]
    shape = (rows, *rest[:-1], rest[-1] * form.packed) if rest else (rows,)
    leaf = next((leaf for leaf in INPUT_SCALES if f"{name}.{leaf}" in files.shapes), "")
    settings = {**settings, "scales": math.prod(leaves["weight_scale"])}
    found = Layer(name, form, settings, shape, leaf if kind in WITH_INPUT_SCALE else "")
    _check_scales(files, found, kind, leaves["weight_scale"])
    return found


def _check_scales(files: TensorFiles, layer: Layer, kind: str, have: tuple[int, ...]):
    of_inputs = files.shapes[f"{layer.name}.{layer.input_scale}"] if layer.input_scale else ()
    if math.prod(of_inputs) != 1:
        what = f"{files.name}: the {layer.input_scale} of {quoted(layer.name)} has shape {of_inputs}"
        raise UnsupportedError(f"{what}, and one number is supported; use another file of this model.")
    if kind in ("mxfp8", "nvfp4"):
        rows, columns = layer.shape
        padded_rows = -(-rows // TILE_ROWS) * TILE_ROWS
        padded_blocks = -(-columns // layer.block // TILE_BLOCKS) * TILE_BLOCKS
        fits = columns % layer.block == 0 and have == (padded_rows, padded_blocks)
    else:
        count = torch.Size(have).numel()
        fits = count == 1 or (count == layer.shape[0] == have[0])
    if not fits or (layer.block > 1 and layer.shape[1] % layer.block):
        raise UnsupportedError(
            f"{files.name}: the scales of {quoted(layer.name)} have shape {have}, which does not fit its "
            f"{kind} weight of shape {layer.shape}; use another file of this model."
        )
