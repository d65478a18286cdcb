"""How each quantized format stores a matrix, and the weight that it stands for.

A matrix is a few tensors by role: ``values`` (rows, elements); ``scale`` (1) or (rows, 1); ``block_scales``
(rows, blocks of columns); ``tensor_scale`` (1); ``codebook`` (16), what four bits stand for; ``smoothing``
(columns), of the layer's input; ``input_scale`` (1), under which inputs are quantized (kernels.py). Values
are multiplied by their scales in ComfyUI's order and precision; products with float8 or int8 under one scale
may be multiplied instead (packed_weight.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedError, quoted
from ..runtime.callbacks import always

#: Role -> tensor, of some rows.
Stored = Mapping[str, Tensor]
#: Of a layer: what its file says, with "format"; GGUF and plain float8 have that alone, others "scales" too:
#: how many their weight has.
Settings = Mapping
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
#: Values of the four bits of E2M1.
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
#: Values that are rotated together, at most.
MAX_ROTATED = 4_096
#: Scales that most formats have or may have, by their leaf.
SCALES = ("weight_scale", "scale_weight", "weight_scale_2", "pre_quant_scale")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as messages and settings have it, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Effort:
    """What it takes to dequantize to half precision.

    moved: bytes that operators read and write for a value, scales included; kernels: how many they start for
    all that is dequantized at once; made: most bytes a value that they hold between them. Counted by
    tests/unit/test_dequantized.py, of 1024 x 4096 values, with groups of 256.
    """

    moved: float
    kernels: int
    made: float


@dataclass(frozen=True)
class Format:
    """How a format stores a matrix, and how that becomes the weight.

    weight: (stored tensors, settings, dtype, memory or None) -> the weight of these rows, in that memory if
    the format can write to it, else in ``dtype`` or float32. value_types: in which a file may store values.
    needs: leaves that it must have; leaves: that are read where they are there. block: settings -> how many
    neighbours in a row can only be read together. values_per_element: of what is stored. short: its name in
    reports. tiles: types of a weight_scale in cuBLAS' tiles, a scale for each block. effort: to dequantize
    with the format's usual settings (effort_of).
    """

    weight: Callable[[Stored, Settings, torch.dtype, Tensor | None], Tensor]
    value_types: tuple[str, ...]
    needs: tuple[str, ...] = ("weight_scale",)
    leaves: tuple[str, ...] = SCALES
    block: Callable[[Settings], int] = always(1)
    values_per_element: int = 1
    short: str = ""
    tiles: tuple[str, ...] = ()
    effort: Effort = Effort(7.0, 3, 0.0)


class Quantization(NamedTuple):
    """A quantized matrix's format, and what its file says of it."""

    format: Format
    settings: Settings


def _float8(stored: Stored, settings: Settings, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    weight = _cast(stored["values"], dtype, out)
    return torch.mul(weight, stored["scale"].to(dtype), out=out) if "scale" in stored else weight


def _int8(stored: Stored, settings: Settings, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    size = rotation(settings)
    if size is None and "scale" not in stored:
        return _cast(stored["values"], dtype, out)
    scale = stored["scale"].float() if "scale" in stored else 1.0
    weight = torch.mul(stored["values"], scale, out=out if size is None else None)
    return weight if size is None else rotated(weight.float(), size)


def _cast(values: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Return values of one byte in ``dtype``, which holds each of them."""
    return values.to(dtype) if out is None else out.copy_(values)


def _convrot_w4a4(stored: Stored, settings: Settings, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Dequantize signed values of four bits under a scale for each row, and rotate them back."""
    signed = (_nibbles(stored["values"]) ^ 8) - 8  # two's complement
    return rotated(signed.float() * stored["scale"].float(), rotation_size(settings))


def _w4a8(stored: Stored, settings: Settings, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Dequantize codes of four bits to the int8 that comfy-kitchen multiplies by, then to the weight. A code
    is an index into the codebook, or its value plus 8. Groups have a scale, which gives int8; rows have
    another, which gives the rotated weight."""
    codes = _nibbles(stored["values"])
    if "codebook" in stored:
        levels = F.embedding(codes.int(), stored["codebook"].float().view(-1, 1)).squeeze(-1)
    else:
        levels = codes.float() - 8
    groups = levels.unflatten(1, (-1, scale_group(settings))) * _e4m3(stored["block_scales"]).unsqueeze(-1)
    grid = groups.flatten(1).round().clamp(-127, 127)
    return rotated((grid * stored["scale"].float()).to(dtype), rotation_size(settings))


def _nibbles(pairs: Tensor) -> Tensor:
    """Unpack pairs of four bits, the low ones first, into (rows, columns) from 0 to 15."""
    return torch.stack([pairs & 15, pairs >> 4 & 15], dim=-1).flatten(1)


def _e4m3(scales: Tensor) -> Tensor:
    """Return scales in float32, of which some files store E4M3 as bytes."""
    return (scales.view(torch.float8_e4m3fn) if scales.dtype == torch.uint8 else scales).float()


def _mxfp8(stored: Stored, settings: Settings, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Dequantize blocks of 32 E4M3 values under a float's exponent (OCP Microscaling Formats 1.0)."""
    scales = (stored["block_scales"].int() << 23).view(torch.float32)
    return _scaled(stored["values"].float(), scales, out)


def _scaled(values: Tensor, scales: Tensor, out: Tensor | None) -> Tensor:
    """Multiply the blocks of each row by their ``scales`` (rows, blocks)."""
    blocks = (scales.shape[1], -1)
    into = None if out is None else out.unflatten(1, blocks)
    found = torch.mul(values.unflatten(1, blocks), scales.unsqueeze(-1), out=into)
    return found.flatten(1) if out is None else out


def _nvfp4(stored: Stored, settings: Settings, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Dequantize NVFP4: blocks of 16 E2M1 values, high bits first, under E4M3 scales, and one scale of
    all."""
    # embedding takes int32 as it is; an index would be copied to int64
    values = F.embedding(stored["values"].int(), _e2m1(stored["values"].device, dtype)).flatten(1)
    block_scales = stored["block_scales"].contiguous().view(torch.float8_e4m3fn)
    scales = stored["tensor_scale"].to(dtype) * block_scales.to(dtype)
    return _scaled(values, scales, out)


@cache
def _e2m1(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the two values of each byte, (256, 2)."""
    pairs = [(E2M1[byte >> 4], E2M1[byte & 15]) for byte in range(256)]
    return torch.tensor(pairs, device=device, dtype=dtype)


def _setting(settings: Settings, name: str, default: int | None = None):
    """Return what the file says of a layer, besides its format or under "params"."""
    nested = settings.get("params")
    return settings.get(name, nested.get(name, default) if isinstance(nested, dict) else default)


def rotation(settings: Settings) -> int | None:
    """Return the group size of an int8 layer's rotation (ConvRot), or None. Raises UnsupportedError."""
    return rotation_size(settings) if _setting(settings, "convrot") else None


def rotation_size(settings: Settings) -> int:
    """Return the group size of a rotated layer's rotation. Raises UnsupportedError."""
    size = _setting(settings, "convrot_groupsize", default=256)
    if size not in (4**power for power in range(1, 7)):  # 4 to MAX_ROTATED
        raise UnsupportedError(
            f"a layer is rotated in groups of {quoted(size)} values, and a power of four up to "
            f"{MAX_ROTATED:,} is supported; use another file of this model."
        )
    return size


def scale_group(settings: Settings) -> int:
    """Return how many neighbours in a row of asym_w4a8_int8 share a scale. Raises UnsupportedError."""
    size = _setting(settings, "group_size", default=16)
    if not isinstance(size, int) or not 4 <= size <= MAX_ROTATED or (16 % size and size % 16):
        raise UnsupportedError(
            f"a layer has scales of groups of {quoted(size)} values, and 4, 8 and multiples of 16 up to "
            f"{MAX_ROTATED:,} are supported; use another file of this model."
        )
    return size


def rotated(x: Tensor, size: int | None) -> Tensor:
    """Rotate groups of ``size`` columns, or rotate them back (ConvRot); None rotates nothing."""
    if size is None:
        return x
    return (x.unflatten(-1, (-1, size)) @ hadamard(size, x.device).to(x.dtype)).flatten(-2)


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Return the regular Hadamard matrix of ``size``, a power of four; symmetric and its own inverse."""
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], device=device) / 2
    matrix = four
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    return matrix


#: Name in files -> format, of safetensors files.
FORMATS = {
    "float8_e4m3fn": Format(_float8, tuple(FLOAT8), short="fp8"),
    "float8_e5m2": Format(_float8, tuple(FLOAT8), short="fp8"),
    "int8_tensorwise": Format(
        _int8,
        ("I8",),
        block=lambda settings: rotation(settings) or 1,
        short="int8",
        effort=Effort(19.1, 3, 8.0),
    ),
    "mxfp8": Format(
        _mxfp8,
        ("F8_E4M3",),
        block=always(32),
        short="mxfp8",
        tiles=("F8_E8M0", "U8"),
        effort=Effort(11.5, 4, 4.1),
    ),
    # of files of scaled fp8 that keep some layers as they were, under a scale that ComfyUI multiplies too
    "scaled plain": Format(_float8, ("BF16", "F16", "F32"), short="scaled", effort=Effort(8.0, 3, 0.0)),
    "nvfp4": Format(
        _nvfp4,
        ("U8",),
        needs=("weight_scale", "weight_scale_2"),
        block=always(16),
        values_per_element=2,
        short="nvfp4",
        tiles=("F8_E4M3", "U8"),
        effort=Effort(11.1, 6, 4.0),
    ),
    "convrot_w4a4": Format(
        _convrot_w4a4,
        ("I8",),
        leaves=("weight_scale",),
        block=rotation_size,
        values_per_element=2,
        short="w4a4",
        effort=Effort(36.1, 10, 9.0),
    ),
    "asym_w4a8_int8": Format(
        _w4a8,
        ("I8",),
        needs=("weight_s_rel", "weight_s_channel"),
        leaves=("weight_s_rel", "weight_s_channel", "weight_codebook"),
        block=lambda settings: math.lcm(rotation_size(settings), scale_group(settings), 16),
        values_per_element=2,
        short="w4a8",
        effort=Effort(64.7, 15, 19.0),
    ),
}
#: Float8 without scales.
PLAIN_FLOAT8 = Format(_float8, tuple(FLOAT8), needs=(), short="fp8", effort=Effort(3.0, 1, 0.0))
#: Formats whose one scale may multiply products instead of the weight (packed_weight.py), and in which types.
#: Not float16: sums of values without it are up to 448 times larger, and parts of them may be stored in
#: float16, too.
ONE_BYTE = ("fp8", "int8")
SCALED_AFTER = (torch.float32, torch.bfloat16)
#: Of int8 in rows that are not rotated.
UNROTATED = Effort(3.0, 1, 0.0)


def effort_of(form: Format, settings: Settings, dtype: torch.dtype = torch.bfloat16) -> Effort:
    """Return what it takes to dequantize a layer of these settings for products in ``dtype``."""
    if form.short == "int8" and rotation(settings) is None:
        return UNROTATED
    if form.short == "fp8" and settings.get("scales") == 1 and dtype in SCALED_AFTER:
        return PLAIN_FLOAT8.effort
    return form.effort
