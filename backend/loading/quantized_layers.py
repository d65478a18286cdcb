"""Quantized layers of a safetensors file: what it says of each, checked before anything is read.

A layer X names its format in the tensor X.comfy_quant (JSON) or in the header's _quantization_metadata.
Others show it by their tensors: X.scale_weight or X.weight_scale next to float8 values ("scaled fp8"),
X.weight_scale next to int8 values (lightx2v), X.weight_scale_2 next to bytes (nvfp4), and X.scale_weight next
to plain values where the file has the marker scaled_fp8.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import UnsupportedError, quoted, reason
from ..models.key_layout import PREFIXES
from ..quantization.formats import FLOAT8, FORMATS, Format, scale_group
from .files.safetensors_files import TensorFiles

#: Leaves of a layer besides weight, bias and scales of the weight: scales of activations, where they are
#: quantized too; what describes formats.
INPUT_SCALES = ("input_scale", "scale_input")
DESCRIPTIONS = ("comfy_quant", "scaled_fp8")
#: Formats under whose input_scale ComfyUI quantizes activations.
WITH_INPUT_SCALE = ("float8_e4m3fn", "nvfp4")
#: Block scales are stored in cuBLAS' tiles of 128 rows x 4 blocks.
TILE_ROWS, TILE_BLOCKS = 128, 4
#: File types of most scales.
PLAIN = ("F32", "BF16", "F16")
#: End of refusals.
BAD_CONVERSION = "the file was converted badly: use another one of this model"
#: Values of a codebook.
CODES = 16
#: Bytes of a layer's description (a few dozen as published).
MAX_SETTINGS_BYTES = 4_096


#: What a tensor next to a weight has a number for. group: neighbours in a row (formats.scale_group); block:
#: those of formats with tiles; code: a value of the codebook.
Each = Literal["matrix", "matrix or row", "row", "column", "group", "block", "code"]


class Leaf(NamedTuple):
    """A tensor next to a weight. role: as in formats.py; each: what it has a number for; types: as stored."""

    role: str
    each: Each
    types: tuple[str, ...] = PLAIN


#: Name of a leaf -> what it is; weight_scale is of blocks in formats with tiles (QuantizedLayer.leaf).
LEAVES = {
    "weight_scale": Leaf("scale", each="matrix or row"),
    "scale_weight": Leaf("scale", each="matrix or row"),
    "weight_scale_2": Leaf("tensor_scale", each="matrix"),
    "pre_quant_scale": Leaf("smoothing", each="column"),
    "weight_s_rel": Leaf("block_scales", each="group", types=(*PLAIN, "F8_E4M3", "U8")),
    "weight_s_channel": Leaf("scale", each="row"),
    "weight_codebook": Leaf("codebook", each="code"),
    **dict.fromkeys(INPUT_SCALES, Leaf("input_scale", each="matrix")),
}


@dataclass(frozen=True)
class QuantizedLayer:
    """A quantized layer.

    name: X of the file's X.weight. settings: what the file says of it, and "scales", how many the matrix has.
    shape: of the weight. leaves: what the file has of LEAVES.
    """

    name: str
    format: Format
    settings: Mapping
    shape: tuple[int, ...]
    leaves: tuple[str, ...] = ()

    @property
    def block(self) -> int:
        """Neighbours in a row that can only be read together."""
        return self.format.block(self.settings)

    @property
    def columns(self) -> int:
        """Columns of a matrix; 1 of what is none."""
        return self.shape[1] if len(self.shape) == 2 else 1

    def leaf(self, name: str) -> Leaf:
        """Return what a leaf is to this layer."""
        if name == "weight_scale" and self.format.tiles:
            return Leaf("block_scales", each="block", types=self.format.tiles)
        return LEAVES[name]

    def group(self, leaf: Leaf) -> int:
        """Return how many neighbours in a row share a number of a leaf, which is of groups or of blocks."""
        return {"group": scale_group, "block": self.format.block}[leaf.each](self.settings)

    def is_of_rows(self, shape: tuple[int, ...]) -> bool:
        """Return whether a scale of ``shape`` has a number for each of several rows."""
        return bool(shape) and shape[0] == self.shape[0] > 1

    def scale_size(self, name: str, shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, int]:
        """Return the length and the values of a leaf of ``shape`` that so much of the weight needs."""
        leaf = self.leaf(name)
        if leaf.each in ("block", "group"):
            return rows, rows * columns // self.group(leaf)
        lengths = {"column": columns, "code": CODES}
        length = lengths.get(leaf.each, rows if self.is_of_rows(shape) else 1)
        return length, length

    def covering(self, columns: range) -> range:
        """Return the whole blocks that hold ``columns``."""
        return range(columns.start // self.block * self.block, -(-columns.stop // self.block) * self.block)


def find_layers(files: TensorFiles) -> list[QuantizedLayer]:
    """Return the quantized layers of ``files``, checked. Raises UnsupportedError."""
    in_header = dict(_described_in_header(files))
    settings_of = dict(in_header)
    marker = next((key for key in files.shapes if key.rpartition(".")[2] == "scaled_fp8"), None)
    # ComfyUI's convention: two numbers in the marker ask for products in full precision
    is_precise = marker is not None and math.prod(files.shapes[marker]) == 2
    for key in files.shapes:
        name, _, leaf = key.rpartition(".")
        weight = f"{name}.weight"
        if leaf == "comfy_quant":
            settings = _settings(files, key, _bytes(files, key))
            _check_once(files, name, in_header.get(name, settings), settings)
            settings_of[name] = settings
        elif name in settings_of or not files.shapes.get(weight):
            continue
        elif leaf in ("scale_weight", "weight_scale"):
            stored = files.stored_dtype(weight)
            if stored in FLOAT8:
                precise = {"full_precision_matrix_mult": True} if is_precise else {}
                settings_of[name] = {"format": FLOAT8[stored], **precise}
            elif leaf == "weight_scale" and stored == "I8":  # as lightx2v's converter writes it
                settings_of[name] = {"format": "int8_tensorwise"}
            elif leaf == "scale_weight" and marker is not None:
                settings_of[name] = {"format": "scaled plain"}
        elif leaf == "weight_scale_2" and files.stored_dtype(weight) == "U8":
            settings_of[name] = {"format": "nvfp4"}
    return [_checked(files, name, settings) for name, settings in settings_of.items()]


def _check_once(files: TensorFiles, name: str, first: Mapping, second: Mapping):
    """Refuse a layer that header and tensor describe in two ways."""
    if first.get("format") != second.get("format"):
        both = " and ".join(quoted(each.get("format")) for each in (first, second))
        raise UnsupportedError(
            f"{files.name} describes the layer {quoted(name)} twice, as {both}; {BAD_CONVERSION}."
        )


def _bytes(files: TensorFiles, key: str) -> bytes:
    shape = files.shapes[key]
    if math.prod(shape) > MAX_SETTINGS_BYTES or files.stored_dtype(key) != "U8":
        what = f"{files.name}: {quoted(key)} has shape {quoted(shape)} of {files.stored_dtype(key)}"
        raise UnsupportedError(
            f"{what}, and describes a layer in {MAX_SETTINGS_BYTES:,} bytes at most; {BAD_CONVERSION}."
        )
    return bytes(files.read(key).flatten().tolist())


def _settings(files: TensorFiles, where: str, text: str | bytes) -> dict:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"{quoted(where)} is no JSON ({reason(error)})"
        raise UnsupportedError(f"{files.name}: {why}; {BAD_CONVERSION}.") from None
    return found if isinstance(found, dict) else {}


def _described_in_header(files: TensorFiles):
    """Yield the layers of the header's _quantization_metadata, whose names may lack the keys' prefix."""
    where = "_quantization_metadata"
    layers = _settings(files, where, files.metadata.get(where, "{}")).get("layers", {})
    for name, settings in (layers if isinstance(layers, dict) else {}).items():
        prefix = next((prefix for prefix in PREFIXES if f"{prefix}{name}.weight" in files.shapes), "")
        yield prefix + name, settings if isinstance(settings, dict) else {}


def _checked(files: TensorFiles, name: str, settings: Mapping) -> QuantizedLayer:
    kind = settings.get("format")
    stored = files.stored_dtype(f"{name}.weight") if f"{name}.weight" in files.shapes else "nothing"
    layer = f"{files.name}: the layer {quoted(name)}"
    if not isinstance(kind, str) or kind not in FORMATS:
        raise UnsupportedError(
            f"{layer} is quantized as {quoted(kind)}, which is not supported; supported are "
            f"{', '.join(FORMATS)} and GGUF. Use another file of this model."
        )
    form = FORMATS[kind]
    if stored not in form.value_types:
        raise UnsupportedError(f"{layer} is said to be {kind} but is stored as {stored}; {BAD_CONVERSION}.")
    leaves = [leaf for leaf in form.leaves if f"{name}.{leaf}" in files.shapes]
    if {"weight_scale", "scale_weight"} <= {*leaves}:
        raise UnsupportedError(f"{layer} has both weight_scale and scale_weight; {BAD_CONVERSION}.")
    scale = "scale_weight" if "scale_weight" in leaves else form.needs[0]
    missing = [leaf for leaf in (scale, *form.needs[1:]) if leaf not in leaves]
    if missing:
        what = f"{layer} is quantized as {kind} but lacks {', '.join(missing)}"
        raise UnsupportedError(f"{what}; the file is incomplete: download it again.")
    shape = files.shapes[f"{name}.weight"]
    shape = (*shape[:-1], shape[-1] * form.values_per_element) if len(shape) > 1 else shape
    settings = {**settings, "scales": math.prod(files.shapes[f"{name}.{scale}"])}
    if kind in WITH_INPUT_SCALE:
        leaves += [leaf for leaf in INPUT_SCALES if f"{name}.{leaf}" in files.shapes][:1]
    checked = QuantizedLayer(name=name, format=form, settings=settings, shape=shape, leaves=tuple(leaves))
    _check_shape(files, checked, kind)
    for each in leaves:
        _check_scale(files, checked, kind, each)
    return checked


def _check_shape(files: TensorFiles, layer: QuantizedLayer, kind: str):
    """Refuse a weight that its format cannot store. Raises UnsupportedError."""
    what = f"{files.name}: the {kind} weight of {quoted(layer.name)} has shape {layer.shape}"
    in_blocks = layer.block > 1 or layer.format.values_per_element > 1
    if not layer.shape or (in_blocks and len(layer.shape) != 2):
        raise UnsupportedError(f"{what}, and a matrix is needed; {BAD_CONVERSION}.")
    if layer.shape[-1] % layer.block:
        raise UnsupportedError(
            f"{what}, whose rows are no whole groups of {layer.block} values; {BAD_CONVERSION}."
        )


def _check_scale(files: TensorFiles, layer: QuantizedLayer, kind: str, name: str):
    """Refuse a scale of another shape or type than its format has. Raises UnsupportedError."""
    key = f"{layer.name}.{name}"
    have = files.shapes[key]
    leaf = layer.leaf(name)
    if not _fits(layer, leaf, have):
        raise UnsupportedError(
            f"{files.name}: the scale {quoted(key)} has shape {have}, which does not fit its {kind} weight "
            f"of shape {layer.shape}; use another file of this model."
        )
    if files.stored_dtype(key) not in leaf.types:
        what = f"{files.name}: the scale {quoted(key)} is stored as {files.stored_dtype(key)}"
        raise UnsupportedError(
            f"{what}, and {kind} has {', '.join(leaf.types)}; use another file of this model."
        )


def _fits(layer: QuantizedLayer, leaf: Leaf, have: tuple[int, ...]) -> bool:
    """Return whether a leaf of this shape has as many numbers as it must."""
    rows = layer.shape[0]
    if leaf.each == "matrix":
        return math.prod(have) == 1
    if leaf.each == "matrix or row":
        return math.prod(have) == 1 or have[0] == rows == math.prod(have)
    if leaf.each == "group":
        return have == (rows, layer.columns // layer.group(leaf))
    if leaf.each == "block":
        blocks = layer.columns // layer.group(leaf)
        return have == (-(-rows // TILE_ROWS) * TILE_ROWS, -(-blocks // TILE_BLOCKS) * TILE_BLOCKS)
    return have == ({"row": rows, "column": layer.shape[-1], "code": CODES}[leaf.each],)
