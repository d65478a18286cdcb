"""How each quantized format stores a matrix, and the weight that it stands for.

A matrix is a few tensors by role: ``values`` (rows, elements); ``scale`` (1) or (rows, 1); ``block_scales``
(rows, blocks of columns); ``tensor_scale`` (1); ``smoothing`` (columns), of the layer's input;
``input_scale`` (1), under which inputs are quantized (kernels.py). Values are multiplied by their scales in
ComfyUI's order and precision.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from ..errors import UnsupportedError, quoted

#: Role -> tensor, of some rows.
Stored = Mapping[str, Tensor]
#: What the file says of a layer beside its format.
Settings = Mapping
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
#: Values of the four bits of E2M1.
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
#: Values that are rotated together, at most.
MOST_ROTATED = 4_096


@dataclass(frozen=True)
class Format:
    """weight: stored tensors, settings and dtype -> the weight of these rows; stored: the file's dtypes;
    needs: leaves that must be there; block: settings -> neighbours in a row that can only be read together;
    packed: values in an element; short: its name in reports; is_blocked: has scales of blocks."""

    weight: Callable[[Stored, Settings, torch.dtype], Tensor]
    stored: tuple[str, ...]
    needs: tuple[str, ...] = ("weight_scale",)
    block: Callable[[Settings], int] = lambda settings: 1
    packed: int = 1
    short: str = ""
    is_blocked: bool = False


def _float8(stored: Stored, settings: Settings, dtype: torch.dtype) -> Tensor:
    values = stored["values"].to(dtype)
    return values * stored["scale"].to(dtype) if "scale" in stored else values


def _int8(stored: Stored, settings: Settings, dtype: torch.dtype) -> Tensor:
    weight = stored["values"].float() * stored["scale"].float()
    size = rotation(settings)
    if size is None:
        return weight
    return (weight.unflatten(1, (-1, size)) @ hadamard(size, weight.device)).flatten(1)


def _mxfp8(stored: Stored, settings: Settings, dtype: torch.dtype) -> Tensor:
    """Dequantize blocks of 32 E4M3 values under a float's exponent (OCP Microscaling Formats 1.0)."""
    scales = (stored["block_scales"].int() << 23).view(torch.float32)
    return (stored["values"].float().unflatten(1, (-1, 32)) * scales.unsqueeze(-1)).flatten(1)


def _nvfp4(stored: Stored, settings: Settings, dtype: torch.dtype) -> Tensor:
    """Dequantize blocks of 16 E2M1 values under an E4M3 scale, and one scale for all (NVIDIA's NVFP4); the
    first value of a byte is in its high bits."""
    pairs = stored["values"]
    bits = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(1).int()
    block_scales = stored["block_scales"].contiguous().view(torch.float8_e4m3fn)
    scales = stored["tensor_scale"].to(dtype) * block_scales.to(dtype)
    return (_e2m1(pairs.device, dtype)[bits].unflatten(1, (-1, 16)) * scales.unsqueeze(-1)).flatten(1)


def _gguf(stored: Stored, settings: Settings, dtype: torch.dtype) -> Tensor:
    """Dequantize a GGUF type's blocks, by diffusers' functions in float32."""
    dequantize, block, size = gguf_type(settings["format"])
    values = stored["values"]
    return dequantize(values.reshape(-1, size), block, size, torch.float32).view(len(values), -1)


@cache
def gguf_type(kind: str) -> tuple[Callable, int, int]:
    """Return (dequantization, values, bytes) of a block of the GGUF type of that name."""
    import gguf
    from diffusers.quantizers.gguf.utils import dequantize_functions

    type_ = gguf.GGMLQuantizationType[kind]
    return (dequantize_functions[type_], *gguf.GGML_QUANT_SIZES[type_])


@cache
def _e2m1(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(E2M1, device=device, dtype=dtype)


def rotation(settings: Settings) -> int | None:
    """Return the group size of an int8 layer's rotation (ConvRot); None where it was not rotated. Raises
    UnsupportedError."""
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
    "int8_tensorwise": Format(_int8, ("I8",), block=lambda settings: rotation(settings) or 1, short="int8"),
    "mxfp8": Format(_mxfp8, ("F8_E4M3",), block=lambda settings: 32, short="mxfp8", is_blocked=True),
    # of files of scaled fp8 that keep some layers as they were, under a scale that ComfyUI multiplies too
    "scaled plain": Format(_float8, ("BF16", "F16", "F32"), short="scaled"),
    "nvfp4": Format(
        _nvfp4,
        ("U8",),
        ("weight_scale", "weight_scale_2"),
        lambda settings: 16,
        packed=2,
        short="nvfp4",
        is_blocked=True,
    ),
}
#: Float8 without scales.
PLAIN_FLOAT8 = Format(_float8, tuple(FLOAT8), (), short="fp8")


@cache
def gguf_format(kind: str) -> Format:
    """Return the format of a GGUF type; its blocks are bytes."""
    _, block, _ = gguf_type(kind)
    return Format(_gguf, (kind,), (), partial(_constant, block), short=kind)


def _constant(block: int, settings: Settings) -> int:
    return block
