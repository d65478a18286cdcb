"""What dequantizing costs and gives: the values of ComfyUI's order of operations to the bit, in few passes
over them, which the planner counts."""

from dataclasses import replace
from functools import cache

import memory_table
import pytest
import torch
import torch.nn.functional as F
from headers import opened
from live_memory import LiveMemory
from moved_bytes import MovedBytes
from published import L40
from released_forms import checkpoint_of

from backend.config import ParallelConfig
from backend.planner.cost import LAUNCHES, Cost
from backend.planner.machine import RequestEstimate
from backend.quantization import formats, gguf_blocks
from backend.quantization.formats import (
    E2M1,
    FORMATS,
    PLAIN_FLOAT8,
    Effort,
    effort_of,
    hadamard,
)
from backend.quantization.gguf_blocks import FILLS, GGUF_EFFORT, GGUF_SCALES, gguf_format, gguf_type
from backend.quantization.packed import HELD, Packed, columns_of, join
from backend.quantization.packed_weight import PackedWeight, free_scratch, read_factors
from backend.rank_plan.shape_of import shape_of

ROWS, COLUMNS = 256, 4096
RUNS = (range(3, 1029), range(2000, COLUMNS - 7))
ROTATED = {"convrot": True, "convrot_groupsize": 256, "group_size": 16}


@pytest.fixture(scope="module", autouse=True)
def no_constants():
    """Those of tests in inference mode are copied outside of it."""
    for constants in (gguf_blocks._on_device, formats._e2m1, hadamard):
        constants.cache_clear()


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
    columns = (COLUMNS, more.pop("own", (range(COLUMNS),)))
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
    for own, pieces in (((range(COLUMNS),), want), (RUNS, columns_of(want, RUNS))):
        factors = columns_of(smoothing, own).to(dtype)
        for more, expected in (({}, pieces), ({"smoothing": smoothing}, pieces * factors)):
            piece = packed(kind, own=own, **more)
            assert piece.dequantize(dtype).equal(expected)
            assert piece.dequantize(dtype, torch.empty(piece.shape, dtype=dtype)).equal(expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_one_scale_multiplies_products_instead_of_weights(dtype, bias):
    """Float8 weights are read once, where to scale them reads and writes them again: 4 bytes a value less.
    Also of some columns, and no less precise."""
    x, added = number(2, 9, COLUMNS).to(dtype), number(64).to(dtype) if bias else None
    few = {**stored("float8_e4m3fn"), "values": stored("float8_e4m3fn")["values"][:64]}
    for own in ((range(COLUMNS),), RUNS):
        piece = replace(packed("float8_e4m3fn", own=own), tensors=few)
        weight, inputs = PackedWeight(piece, dtype), columns_of(x, own)
        wide = None if added is None else added.double()
        exact = F.linear(inputs.double(), piece.dequantize(torch.float64), wide)
        error = (weight.linear(inputs, added) - exact).norm() / exact.norm()
        theirs = (F.linear(inputs, piece.dequantize(dtype), added) - exact).norm() / exact.norm()
        assert error <= 1.05 * theirs + 1e-7
    weight = PackedWeight(packed("float8_e4m3fn"), dtype)
    with MovedBytes() as moved:
        weight.linear(x[0, :1], None)
    assert moved.bytes / weight.shape.numel() == pytest.approx(1 + 2 * dtype.itemsize, rel=0.05)


def test_in_float16_the_scale_stays_in_the_weight():
    """Parts of sums may be stored in float16: without the scale they may be infinite."""
    assert PackedWeight(packed("float8_e4m3fn"), torch.float16).factor is None
    assert PackedWeight(packed("float8_e4m3fn"), torch.bfloat16).factor == pytest.approx(0.37)


def test_scales_of_all_weights_are_read_at_once(monkeypatch):
    """On a GPU; one that was not read is read by its first product."""
    read, item, tolist = [], torch.Tensor.item, torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "item", lambda scale: read.append(scale) or item(scale))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda scales: read.append(scales) or tolist(scales))
    monkeypatch.setattr(torch.Tensor, "__float__", torch.Tensor.item)
    weights = [PackedWeight(packed("float8_e4m3fn"), torch.bfloat16) for _ in range(3)]
    read.clear()
    for scale, weight in enumerate(weights):
        weight._scale = torch.tensor([scale + 0.37])  # as of one on a GPU
    read_factors(torch.nn.ModuleList(weights[:2]))
    assert [weight.factor for weight in weights[:2]] == pytest.approx([0.37, 1.37]) and len(read) == 1
    assert weights[2].factor == weights[2].factor == pytest.approx(2.37) and len(read) == 2


@pytest.mark.parametrize("kind, moved_bytes", [("int8 in rows", 3), ("int8_tensorwise", 19)])
@pytest.mark.parametrize("bias", [None, number(ROWS)], ids=["bare", "bias"])
def test_int8_under_one_scale_is_read_as_it_is(kind, moved_bytes, bias):
    """Rotated or not: the scale multiplies products."""
    free_scratch()  # that of inference mode cannot be written outside of it
    piece = packed(kind, scale=torch.tensor([0.37]))
    weight, x = PackedWeight(piece, torch.float32), number(5, COLUMNS)
    want = F.linear(x, piece.dequantize(torch.float32), bias)
    assert weight.factor == pytest.approx(0.37)
    assert (weight.linear(x, bias) - want).norm() <= 1e-6 * want.norm()
    weight = PackedWeight(piece, torch.bfloat16)
    weight.dequantized(but="scale")  # what is made once is there
    with MovedBytes() as moved:
        weight.dequantized(but="scale")
    assert moved.bytes / weight.shape.numel() == pytest.approx(moved_bytes, rel=0.03)


def test_columns_that_follow_each_other_are_one_run():
    """Else layers whose inputs are cut in several spans would make their weights twice."""
    halves = [
        replace(packed("float8_e4m3fn", own=(own,)), columns=len(own))
        for own in (range(COLUMNS // 2), range(COLUMNS // 2))
    ]
    first, second = (
        replace(half, tensors={**half.tensors, "values": half.tensors["values"][:, at : at + COLUMNS // 2]})
        for half, at in zip(halves, (0, COLUMNS // 2))
    )
    whole = join([first, second], 1)
    assert whole.column_runs == (range(COLUMNS),)
    assert whole.dequantize(torch.float32).equal(packed("float8_e4m3fn").dequantize(torch.float32))


def check(piece: Packed, effort: Effort):
    """Is that what it takes, once what is made once is there?"""
    out = torch.empty(piece.shape, dtype=torch.bfloat16)
    piece.dequantize(torch.bfloat16, out)
    with MovedBytes() as moved, LiveMemory() as memory:
        piece.dequantize(torch.bfloat16, out)
    assert moved.bytes / out.numel() == pytest.approx(effort.moved, rel=0.03)
    assert moved.kernels == effort.kernels
    assert memory.peak / out.numel() == pytest.approx(effort.made, abs=0.1)


@pytest.mark.parametrize("kind", FILES)
def test_what_dequantizing_takes(kind):
    """As the planner counts it; before 7, 11, 23 and 31 bytes were moved (fp8, scaled, int8 in rows,
    ConvRot), 23 (mxfp8, nvfp4)."""
    check(packed(kind), effort_of(*FILES[kind]))


@pytest.mark.parametrize("kind", GGUF_EFFORT)
def test_what_gguf_types_take(kind):
    """By diffusers' functions it was 18.8, 23.1, 11.3, 23.6, 31.7 and 27.9 bytes (Q4_0, Q4_1, Q8_0, Q4_K,
    Q5_K, Q6_K) and 7, 7, 3, 21, 26 and 13 kernels."""
    pytest.importorskip("gguf")
    _, block, size = gguf_type(kind)
    values = {"values": bits(COLUMNS // block * size, 30)}
    check(Packed(gguf_format(kind), {"format": kind}, values, COLUMNS, (range(COLUMNS),)), GGUF_EFFORT[kind])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", FILLS)
def test_gguf_types_have_the_bits_of_diffusers(kind, dtype):
    """All bytes of all blocks, under scales that a float16 has; into memory that is given or not."""
    pytest.importorskip("gguf")
    dequantize, block, size = gguf_type(kind)
    values = bits(2 * size)
    for at in GGUF_SCALES[kind]:
        for start in (at, at + size):
            values[:, start : start + 2] = number(ROWS, 1).half().view(torch.uint8)
    piece = Packed(gguf_format(kind), {"format": kind}, {"values": values}, 2 * block, (range(2 * block),))
    want = dequantize(values.view(-1, size), block, size, torch.float32).view(piece.shape).to(dtype)
    assert piece.dequantize(dtype).equal(want)
    some = (range(3, block), range(block + 1, 2 * block))
    assert replace(piece, column_runs=some).dequantize(dtype).equal(columns_of(want, some))


def test_the_planner_counts_them():
    """Of a file in scaled fp8, under one scale a layer, 3 bytes where 2 are the value's; in float16 7."""
    shape = shape_of(opened("var__flux1-kontext_fp8_scaled_legacy"), torch.bfloat16)
    assert all(block.dequantizing == pytest.approx(1.5 * block.unpacked, rel=0.01) for block in shape.blocks)
    halves = shape_of(opened("var__flux1-kontext_fp8_scaled_legacy"), torch.float16)
    assert all(block.dequantizing == pytest.approx(3.5 * block.unpacked, rel=0.01) for block in halves.blocks)
    cost = Cost(shape, ParallelConfig(), L40, RequestEstimate(1024, 128, 4, 1))
    moved = sum(block.dequantizing for block in shape.blocks)
    assert cost._dequantize(shape.blocks) == pytest.approx(moved / L40.bandwidth)


def test_the_planner_counts_the_kernels_that_the_host_starts():
    """Of Q4_K more than of the blocks' own; tensor parallelism dequantizes a part on each rank, Ulysses
    all."""
    qwen = next(file for file in memory_table.FILES if file.model == "Qwen-Image, Q4_K")
    shape = shape_of(checkpoint_of(qwen), torch.bfloat16)
    kernels = sum(block.kernels for block in shape.blocks)
    assert kernels > 3 * LAUNCHES * sum(block.streams for block in shape.blocks)

    def step(**degrees) -> float:
        return Cost(shape, ParallelConfig(**degrees), L40, RequestEstimate(256, 64, 4, 1)).step(1)

    host = L40.launch * kernels / LAUNCHES
    assert host < step(ulysses_degree=4) < 1.5 * host
    assert host / 2 < step(tensor_parallel_degree=2) < host


def test_what_dequantizing_makes_is_planned():
    """In addition to the largest weight: of as many values as are dequantized at once."""
    qwen = next(file for file in memory_table.FILES if file.model == "Qwen-Image, Q4_K")
    shape = shape_of(checkpoint_of(qwen), torch.bfloat16)
    largest = 6 * 3072 * 3072  # of modulation
    made = min(HELD, largest * GGUF_EFFORT["Q4_K"].made)
    assert shape.scratch == pytest.approx(2 * largest + made, rel=0.01)
