"""What dequantizing costs and gives: the values of ComfyUI's order of operations to the bit, in few passes
over them, which the planner counts."""

from functools import cache

import pytest
import torch
from headers import opened
from moved_bytes import MovedBytes
from published import L40

from backend.config import ParallelConfig
from backend.planner.cost import Cost
from backend.planner.machine import Request
from backend.quantization.formats import (
    E2M1,
    FORMATS,
    GGUF_MOVED,
    PLAIN_FLOAT8,
    gguf_format,
    gguf_type,
    hadamard,
    moved_bytes,
)
from backend.quantization.packed import Packed, take
from backend.rank_plan.shape_of import shape_of

ROWS, COLUMNS = 1024, 4096
RUNS = (range(3, 1029), range(2000, COLUMNS - 7))
ROTATED = {"convrot": True, "convrot_groupsize": 256, "group_size": 16}


def number(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def bits(columns: int, high: int = 256) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(high, (ROWS, columns), generator=random, dtype=torch.int32).to(torch.uint8)


@cache
def stored(kind: str) -> dict[str, torch.Tensor]:
    """Any values of a format, by role."""
    scale, rows = torch.tensor([0.37]), number(ROWS, 1)
    eight, four = number(ROWS, COLUMNS).to(torch.float8_e4m3fn), bits(COLUMNS // 2)
    if kind.startswith("int8"):
        return {"values": bits(COLUMNS).view(torch.int8), "scale": rows}
    if kind == "convrot_w4a4":
        return {"values": four.view(torch.int8), "scale": rows}
    if kind == "asym_w4a8_int8":
        scales = bits(COLUMNS // 16, 90)
        return {"values": four.view(torch.int8), "scale": rows, "block_scales": scales}
    if kind == "mxfp8":
        return {"values": eight, "block_scales": bits(COLUMNS // 32, 9) + 120}
    if kind == "nvfp4":
        return {"values": four, "block_scales": bits(COLUMNS // 16, 120), "tensor_scale": scale}
    return {"values": eight} if kind == "plain float8" else {"values": eight, "scale": scale}


FILES = {name: (FORMATS[name], {"format": name, **ROTATED}) for name in FORMATS if name != "scaled plain"}
FILES["plain float8"] = (PLAIN_FLOAT8, {})
FILES["int8 in rows"] = (FORMATS["int8_tensorwise"], {})


def packed(kind: str, **more) -> Packed:
    columns = (COLUMNS, more.pop("kept", (range(COLUMNS),)))
    return Packed(*FILES[kind], {**stored(kind), **more}, *columns)


def wanted(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """The weight in ComfyUI's order and precision, an operation at a time."""
    tensors = stored(kind)
    values = tensors["values"]
    if kind == "plain float8":
        return values.to(dtype)
    if kind.startswith("float8"):
        return values.to(dtype) * tensors["scale"].to(dtype)
    if kind.startswith("int8"):
        weight = values.float() * tensors["scale"]
        if kind != "int8 in rows":
            weight = (weight.unflatten(1, (-1, 256)) @ hadamard(256, values.device)).flatten(1)
        return weight.to(dtype)
    if kind == "mxfp8":
        scales = torch.exp2(tensors["block_scales"].float() - 127)
        return (values.float() * scales.repeat_interleave(32, dim=1)).to(dtype)
    codes = torch.stack([values >> 4, values & 15], dim=-1).flatten(1).int()
    scales = tensors["tensor_scale"].to(dtype) * tensors["block_scales"].view(torch.float8_e4m3fn).to(dtype)
    return torch.tensor(E2M1, dtype=dtype)[codes] * scales.repeat_interleave(16, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in FILES if "w4a" not in kind])
def test_bits_do_not_depend_on_the_passes(kind, dtype):
    """Whole, of some columns, and smoothed; into memory that is given or not."""
    want, smoothing = wanted(kind, dtype), torch.linspace(0.5, 2, COLUMNS)
    for kept, pieces in (((range(COLUMNS),), want), (RUNS, take(want, RUNS))):
        own = take(smoothing, kept).to(dtype)
        for more, expected in (({}, pieces), ({"smoothing": smoothing}, pieces * own)):
            piece = packed(kind, kept=kept, **more)
            assert piece.dequantize(dtype).equal(expected)
            assert piece.dequantize(dtype, torch.empty(piece.shape, dtype=dtype)).equal(expected)


def count(piece: Packed) -> float:
    """Bytes a value, once what is made once is there."""
    out = torch.empty(piece.shape, dtype=torch.bfloat16)
    piece.dequantize(torch.bfloat16, out)
    with MovedBytes() as moved:
        piece.dequantize(torch.bfloat16, out)
    return moved.bytes / out.numel()


@pytest.mark.parametrize("kind", FILES)
def test_the_bytes_that_dequantizing_moves(kind):
    """As the planner counts them; before they were 7, 11, 23 and 31 (fp8, scaled, int8 in rows, ConvRot), 23
    (mxfp8, nvfp4) and 4 more for every GGUF type."""
    assert count(packed(kind)) == pytest.approx(moved_bytes(*FILES[kind]), rel=0.03)


@pytest.mark.parametrize("kind", GGUF_MOVED)
def test_the_bytes_that_gguf_types_move(kind):
    pytest.importorskip("gguf")
    _, block, size = gguf_type(kind)
    values = {"values": bits(COLUMNS // block * size, 30)}
    piece = Packed(gguf_format(kind), {"format": kind}, values, COLUMNS, (range(COLUMNS),))
    assert count(piece) == pytest.approx(GGUF_MOVED[kind], rel=0.03)


def test_the_planner_counts_them():
    """Of a file in scaled fp8, 7 bytes where 2 are the value's."""
    shape = shape_of(opened("var__flux1-kontext_fp8_scaled_legacy"), torch.bfloat16)
    assert all(block.dequantizing == pytest.approx(3.5 * block.unpacked, rel=0.01) for block in shape.blocks)
    cost = Cost(shape, ParallelConfig(), L40, Request(1024, 128, 4, 1))
    moved = sum(block.dequantizing for block in shape.blocks)
    assert cost._dequantize(shape.blocks) == pytest.approx(moved / L40.bandwidth)
