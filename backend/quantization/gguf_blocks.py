"""GGUF's types of quantized matrices: blocks of bytes, and the weights that they stand for.

Types that most files have are dequantized here, in few passes over their values: a code of some bits is
multiplied by its group's scale in float32, and the result rounded once, to the type of the weight. The others
are by diffusers' functions, which are ports of ComfyUI-GGUF's (City96, Apache-2.0), as is the order of
operations here. Layouts of blocks: ggml-common.h of llama.cpp.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..runtime.callbacks import always
from .formats import Effort, Format, Settings, Stored

#: GGUF type -> bytes of a block at which its float16 scales and minima begin (ggml-common.h).
GGUF_SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
}
#: Bits of a float16 that are all set in infinity and NaN.
EXPONENT = 0x7C00


def has_finite_scales(kind: str, blocks: Tensor) -> bool:
    """Return whether all scales in ``blocks`` (blocks, bytes) of the GGUF type ``kind`` are finite."""
    found = (blocks[:, at : at + 2].contiguous().view(torch.int16) for at in GGUF_SCALES.get(kind, ()))
    return not any(bool((scales & EXPONENT == EXPONENT).any()) for scales in found)


#: Blocks of bytes (blocks, bytes), where their values go (blocks, values).
Fill = Callable[[Tensor, Tensor], None]


def _float(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of each block, (blocks, 1)."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _q8_0(blocks: Tensor, out: Tensor):
    torch.mul(blocks[:, 2:].view(torch.int8), _float(blocks, 0), out=out)


def _q4_0(blocks: Tensor, out: Tensor):
    scale = _float(blocks, 0)
    pairs = blocks[:, 2:]
    for part, codes in enumerate((pairs & 15, pairs >> 4)):
        torch.mul(codes.view(torch.int8).sub_(8), scale, out=out.unflatten(1, (2, 16))[:, part])


def _q4_1(blocks: Tensor, out: Tensor):
    scale = _float(blocks, 0)
    least = _float(blocks, 2)
    pairs = blocks[:, 4:]
    for part, codes in enumerate((pairs & 15, pairs >> 4)):
        torch.addcmul(least, codes, scale, out=out.unflatten(1, (2, 16))[:, part])


def _q4_k(blocks: Tensor, out: Tensor):
    """Dequantize eight groups of 32 values, two neighbours of them in the halves of 32 bytes."""
    scales, least = _groups_of_8(blocks)
    pairs = blocks[:, 16:].unflatten(1, (4, 32))
    parts = out.unflatten(1, (4, 2, 32))
    for part, codes in enumerate((pairs & 15, pairs >> 4)):
        torch.addcmul(least[:, part::2], codes, scales[:, part::2], out=parts[:, :, part])


def _q5_k(blocks: Tensor, out: Tensor):
    """Dequantize the same, with the fifth bits of group g in the bits g of 32 bytes."""
    scales, least = _groups_of_8(blocks)
    pairs = blocks[:, 48:].unflatten(1, (4, 32))
    parts = out.unflatten(1, (4, 2, 32))
    fifth = blocks[:, 16:48].unsqueeze(1)
    for part, codes in enumerate((pairs & 15, pairs >> 4)):
        bits = _shifted(fifth, range(part, 8, 2)).bitwise_and_(1).bitwise_left_shift_(4)
        torch.addcmul(least[:, part::2], codes.bitwise_or_(bits), scales[:, part::2], out=parts[:, :, part])


def _q6_k(blocks: Tensor, out: Tensor):
    """Dequantize two halves of 4 x 32 values in groups of 16: four bits in 64 bytes, two more in 32 bytes."""
    scales = (_float(blocks, 208) * blocks[:, 192:208].view(torch.int8)).unflatten(1, (8, 2, 1))
    low = blocks[:, :128].unflatten(1, (2, 1, 64))
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32))
    codes = _shifted(low, (0, 4)).bitwise_and_(15).view(-1, 8, 32)
    codes |= _shifted(high, (0, 2, 4, 6)).bitwise_and_(3).bitwise_left_shift_(4).view(-1, 8, 32)
    signed = codes.view(torch.int8).sub_(32).unflatten(2, (2, 16))
    torch.mul(signed, scales, out=out.unflatten(1, (8, 2, 16)))


def _groups_of_8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the least value of each of eight groups, both (blocks, 8, 1).

    Each has six bits; the sixteen share twelve bytes. Bytes 0 to 3 hold the scales of groups 0 to 3, and
    bytes 4 to 7 their least values, in the lower six bits. Bytes 8 to 11 hold the lower four bits of groups 4
    to 7: scales in the lower half, least values in the upper one. Their upper two bits are the upper two of
    bytes 0 to 7.
    """
    packed = blocks[:, 4:16].unflatten(1, (3, 4))
    first = packed[:, :2] & 63
    upper = (packed[:, :2] >> 2).bitwise_and_(48)
    lower = _shifted(packed[:, 2:], (0, 4)).bitwise_and_(15)
    six = torch.cat([first, lower.view(-1, 2, 4).bitwise_or_(upper)], dim=-1)
    signs = _on_device((1.0, -1.0), device=blocks.device, dtype=torch.float32)
    both = six * (blocks[:, :4].view(torch.float16) * signs).unsqueeze(-1)
    return both[:, 0, :, None], both[:, 1, :, None]


def _shifted(x: Tensor, bits: range | tuple[int, ...]) -> Tensor:
    """Return x (..., 1, n) shifted right by each number of ``bits``, (..., bits, n)."""
    shifts = _on_device(tuple(bits), device=x.device, dtype=torch.uint8)
    return x >> shifts.view(-1, 1)


FILLS: dict[str, Fill] = {
    **{"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
}


def weight(stored: Stored, settings: Settings, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Dequantize the blocks of some rows, as Format.weight."""
    dequantize, block_values, block_bytes = gguf_type(settings["format"])
    values = stored["values"]
    blocks = values.reshape(-1, block_bytes)
    fill = FILLS.get(settings["format"])
    if fill is None:
        with _Constants():
            return dequantize(blocks, block_values, block_bytes, torch.float32).view(len(values), -1)
    if out is None:
        columns = block_values * len(blocks) // len(values)
        out = torch.empty(len(values), columns, dtype=dtype, device=values.device)
    fill(blocks, out.view(-1, block_values))
    return out


class _Constants(TorchFunctionMode):
    """Makes each constant of diffusers' functions once: they write lists of shifts to the device at every
    call, and a copy from the host's memory waits for all that the device has to do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.tensor or not isinstance(args[0], (list, tuple)):
            return func(*args, **kwargs)
        return _on_device(tuple(args[0]), **kwargs)


@cache
def _on_device(values: tuple, **options) -> Tensor:
    return torch.tensor(values, **options)


@cache
def gguf_type(kind: str) -> tuple[Callable, int, int]:
    """Return (dequantization, values, bytes) of a block of the GGUF type of that name."""
    import gguf
    from diffusers.quantizers.gguf.utils import dequantize_functions

    type_ = gguf.GGMLQuantizationType[kind]
    return (dequantize_functions[type_], *gguf.GGML_QUANT_SIZES[type_])


#: GGUF type -> what it takes to dequantize (Effort: bytes moved, kernels, bytes made).
GGUF_EFFORT = {
    "Q4_0": Effort(7.4, 7, 1.1),
    "Q4_1": Effort(5.9, 6, 1.2),
    "Q5_0": Effort(43.4, 20, 10.1),
    "Q5_1": Effort(47.8, 20, 11.2),
    "Q8_0": Effort(3.3, 2, 0.1),
    "Q2_K": Effort(23.7, 11, 9.5),
    "Q3_K": Effort(30.0, 22, 7.5),
    "Q4_K": Effort(6.2, 13, 1.2),
    "Q5_K": Effort(14.4, 21, 2.2),
    "Q6_K": Effort(17.4, 10, 2.2),
    "IQ4_NL": Effort(38.8, 7, 12.1),
    "IQ4_XS": Effort(39.8, 16, 12.3),
}


@cache
def gguf_format(kind: str) -> Format:
    """Return the format of a GGUF type; its blocks are bytes."""
    _, block_values, _ = gguf_type(kind)
    return Format(weight, (kind,), needs=(), block=always(block_values), short=kind, effort=GGUF_EFFORT[kind])
