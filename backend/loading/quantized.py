"""ComfyUI's quantized layers, values of few bits with their scales, read as the weights that they stand for.

A layer X names its format in the tensor X.comfy_quant (JSON) or in the header's _quantization_metadata; older
files ("scaled fp8") just have X.scale_weight next to float8 values. Values are multiplied by their scales in
ComfyUI's order and precision. Activations are not quantized here, so input_scale is not needed.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedError, quoted, reason
from ..models.key_layout import PREFIXES, Shapes
from .safetensors_files import ALL, CPU, TensorFiles

#: Leaves of a layer besides weight and bias: scales of the weight; what activations or formats need.
WEIGHT_SCALES = ("weight_scale", "scale_weight", "weight_scale_2", "pre_quant_scale")
IGNORED = ("input_scale", "scale_input", "comfy_quant", "scaled_fp8")
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
#: Values of the four bits of E2M1.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
#: Block scales are stored in cuBLAS' tiles of 128 rows x 4 blocks.
TILE_ROWS, TILE_BLOCKS = 128, 4
#: End of refusals.
BADLY = "the file was converted badly: use another one of this model"
#: Bytes of a layer's description (a few dozen as published).
MOST_SETTINGS = 4_096
#: Values that are rotated together.
MOST_ROTATED = 4_096


@dataclass(frozen=True)
class Layer:
    """A quantized layer: X of X.weight, its format, what the file says of it, and the shape of its weight."""

    name: str
    format: "Format"
    settings: Mapping
    shape: tuple[int, ...]

    @property
    def block(self) -> int:
        """Neighbours in a row that can only be read together."""
        return self.format.block(self.settings)


@dataclass(frozen=True)
class Piece:
    """Rows and columns (whole blocks) of a layer's weight, wanted in ``dtype`` on ``device``."""

    files: TensorFiles
    layer: Layer
    rows: range
    columns: range
    dtype: torch.dtype
    device: torch.device

    def values(self, packed: int = 1) -> Tensor:
        """Read the stored values, ``packed`` of them in an element."""
        whole = len(self.layer.shape) != 2 or self.columns == range(self.layer.shape[1])
        columns = ALL if whole else slice(self.columns.start // packed, self.columns.stop // packed)
        rows = ALL if self.rows == range(self.layer.shape[0]) else slice(self.rows.start, self.rows.stop)
        return self.files.read(f"{self.layer.name}.weight", rows, columns, device=self.device)

    def scale(self, leaf: str = "weight_scale") -> Tensor:
        """Read one number, or one for each row (rows, 1, ...)."""
        key = f"{self.layer.name}.{leaf}"
        if self.files.shapes[key] and self.files.shapes[key][0] == self.layer.shape[0] > 1:
            rows = self.files.read(key, slice(self.rows.start, self.rows.stop), device=self.device)
            return rows.reshape(-1, *[1] * (len(self.layer.shape) - 1))
        return self.files.read(key, device=self.device).reshape(())

    def block_scales(self) -> Tensor:
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
        return scales[self.rows.start - first : self.rows.stop - first, columns]


def _float8(piece: Piece) -> Tensor:
    legacy = f"{piece.layer.name}.scale_weight" in piece.files.shapes
    scale = piece.scale("scale_weight" if legacy else "weight_scale")
    return piece.values().to(piece.dtype) * scale.to(piece.dtype)


def _int8(piece: Piece) -> Tensor:
    weight = piece.values().float() * piece.scale().float()
    size = _rotation(piece.layer.settings)
    if size is None:
        return weight
    return (weight.unflatten(1, (-1, size)) @ _hadamard(size, weight.device)).flatten(1)


def _mxfp8(piece: Piece) -> Tensor:
    """Dequantize blocks of 32 E4M3 values under a float's exponent (OCP Microscaling Formats 1.0)."""
    scales = (piece.block_scales().int() << 23).view(torch.float32)
    return (piece.values().float().unflatten(1, (-1, 32)) * scales.unsqueeze(-1)).flatten(1)


def _nvfp4(piece: Piece) -> Tensor:
    """Dequantize blocks of 16 E2M1 values under an E4M3 scale, and one scale for all (NVIDIA's NVFP4); the
    first value of a byte is in its high bits."""
    pairs = piece.values(packed=2)
    bits = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(1).int()
    values = E2M1.to(piece.device, piece.dtype)[bits]
    block_scales = piece.block_scales().contiguous().view(torch.float8_e4m3fn)
    scales = piece.scale("weight_scale_2").to(piece.dtype) * block_scales.to(piece.dtype)
    return (values.unflatten(1, (-1, 16)) * scales.unsqueeze(-1)).flatten(1)


def _rotation(settings: Mapping) -> int | None:
    """Return the group size of an int8 layer's rotation; None where it was not rotated."""
    nested = settings.get("params")
    settings = {**(nested if isinstance(nested, dict) else {}), **settings}
    size = settings.get("convrot_groupsize", 256)
    if not settings.get("convrot"):
        return None
    if size not in (4**power for power in range(1, 7)):  # 4 to MOST_ROTATED
        raise UnsupportedError(
            f"a layer is rotated in groups of {quoted(size)} values, and a power of four up to "
            f"{MOST_ROTATED:,} is supported; use another file of this model."
        )
    return size


def _hadamard(size: int, device: torch.device) -> Tensor:
    """Return the regular Hadamard matrix of ``size``, a power of four; symmetric and its own inverse."""
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], device=device) / 2
    matrix = four
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    return matrix


@dataclass(frozen=True)
class Format:
    """stored: the file's dtypes; needs: leaves that must be there; block: a layer's settings -> Layer.block;
    packed: values in an element."""

    weight: Callable[[Piece], Tensor]
    stored: tuple[str, ...]
    needs: tuple[str, ...] = ("weight_scale",)
    block: Callable[[Mapping], int] = lambda settings: 1
    packed: int = 1


FORMATS = {
    "float8_e4m3fn": Format(_float8, tuple(FLOAT8)),
    "float8_e5m2": Format(_float8, tuple(FLOAT8)),
    "int8_tensorwise": Format(_int8, ("I8",), block=lambda settings: _rotation(settings) or 1),
    "mxfp8": Format(_mxfp8, ("F8_E4M3",), block=lambda settings: 32),
    # of files of scaled fp8 that keep some layers as they were, under a scale that ComfyUI multiplies too
    "scaled plain": Format(_float8, ("BF16", "F16", "F32")),
    "nvfp4": Format(_nvfp4, ("U8",), ("weight_scale", "weight_scale_2"), lambda settings: 16, packed=2),
}


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
            if key not in scales and key.rpartition(".")[2] not in IGNORED
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
        dtype = dtype or self.dtype(key)
        block = layer.block
        width = layer.shape[1] if len(layer.shape) == 2 else 1
        wanted = range(*columns.indices(width))
        blocks = range(wanted.start // block * block, -(-wanted.stop // block) * block)
        piece = Piece(self.files, layer, range(*rows.indices(layer.shape[0])), blocks, dtype, device)
        weight = layer.format.weight(piece).to(dtype)
        if len(layer.shape) == 2:
            weight = weight[:, wanted.start - blocks.start : wanted.stop - blocks.start]
        # of the layer's input, which may as well be scaled in the weight's columns
        smoothing = f"{layer.name}.pre_quant_scale"
        if smoothing in self.files.shapes:
            weight = weight * self.files.read(smoothing, columns, dtype=dtype, device=device)
        return weight


def _layers(files: TensorFiles) -> list[Layer]:
    """Return the quantized layers of ``files``, checked."""
    found = dict(_described_in_header(files))
    is_scaled_fp8 = any(key.rpartition(".")[2] == "scaled_fp8" for key in files.shapes)
    for key in files.shapes:
        name, _, leaf = key.rpartition(".")
        weight = f"{name}.weight"
        if leaf == "comfy_quant":
            found[name] = _settings(files, key, _bytes(files, key))
        elif leaf in ("scale_weight", "weight_scale") and name not in found and files.shapes.get(weight):
            if files.stored(weight) in FLOAT8:
                found[name] = {"format": FLOAT8[files.stored(weight)]}
            elif leaf == "scale_weight" and is_scaled_fp8:
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
    found = Layer(name, form, settings, shape)
    _check_scales(files, found, kind, leaves["weight_scale"])
    return found


def _check_scales(files: TensorFiles, layer: Layer, kind: str, have: tuple[int, ...]):
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
