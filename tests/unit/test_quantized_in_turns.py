"""Products of quantized weights that hold few rows of their inputs at once, and what is counted of that."""

import pytest
import torch
from kitchen_weights import numbers, ours, theirs
from live_memory import LiveMemory

from backend.quantization import kernels

ROWS, COLUMNS = 96, 256


@torch.inference_mode()
def test_int8_without_fused_kernels_takes_rows_in_turns(kitchen, monkeypatch):
    """They hold several times their output at once; the scales are a row's own, so the result is the same.
    Turns are multiples of what comfy-kitchen pads to."""
    x, bias = numbers(2, 61, COLUMNS, seed=1, dtype=torch.bfloat16), numbers(ROWS, dtype=torch.bfloat16)
    weight = ours(
        "int8", theirs("int8", numbers(ROWS, COLUMNS, seed=3, dtype=torch.bfloat16)), torch.bfloat16
    )
    whole, call, rows = weight.linear(x, bias), kitchen.mm_int8, []
    monkeypatch.setattr(kitchen, "mm_int8", lambda x, w: rows.append(len(x)) or call(x, w))
    for at_once, wanted in ((5, [32, 32, 32, 26]), (70, [64, 58])):
        monkeypatch.setattr(kernels, "CHUNK", at_once * COLUMNS)
        rows.clear()
        assert weight.linear(x, bias).equal(whole) and rows == wanted
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    assert weight.linear(x, bias).equal(whole) and rows == wanted


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int8 of rows", "ConvRot"])
def test_int8_products_hold_what_is_counted(kitchen, monkeypatch, kind, dtype):
    """In addition to their output, of wide inputs and of wide outputs."""
    for rows, columns in ((256, 256), (1024, 256), (256, 1024)):
        monkeypatch.setattr(kernels, "CHUNK", 100 * max(rows, columns))
        weight = ours(kind, theirs(kind, numbers(rows, columns, seed=3, dtype=dtype)), dtype)
        x = numbers(300, columns, seed=1, dtype=dtype)
        memory = LiveMemory()
        with memory:
            out = weight.linear(x, None)
        counted = kernels.chunk_bytes(kernels.int8, 300, rows, columns)
        assert memory.peak - out.nbytes <= counted == kernels.BYTES_PER_CHUNKED_VALUE * kernels.CHUNK


@torch.inference_mode()
@pytest.mark.parametrize(
    "kind, dtype",
    [
        *((kind, torch.float32) for kind in ("int8", "ConvRot", "fp8", "mxfp8", "nvfp4")),
        *((kind, torch.bfloat16) for kind in ("int8", "ConvRot")),  # others are products of bf16 on a CPU,
    ],  # which depend on how many rows there are
    ids=str,
)
def test_inputs_wider_than_outputs_are_quantized_in_turns(kitchen, monkeypatch, kind, dtype):
    """By GPUs' own kernels, too, which the CPU's stand for: a copy of all inputs of Flux.2's single blocks
    made their peak 30 % higher. The values are those of one turn."""
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    in_chunks, turns = kernels._in_chunks, []

    def recorded(x, columns, bias, step, product):
        def counted(chunk: slice):
            turns.append(len(range(*chunk.indices(x.shape[:-1].numel()))))
            return product(chunk)

        return in_chunks(x, columns, bias, step, counted)

    monkeypatch.setattr(kernels, "_in_chunks", recorded)
    x = numbers(2, 170, COLUMNS, seed=1, dtype=dtype)
    for rows, wanted in ((128, [340, 128, 128, 84]), (256, [340, 340])):
        weight, bias = (
            ours(kind, theirs(kind, numbers(rows, COLUMNS, seed=3, dtype=dtype)), dtype),
            numbers(rows),
        )
        whole = weight.linear(x, bias.to(dtype))
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "QUANTIZED", 200 * COLUMNS)
            assert weight.linear(x, bias).equal(whole) and turns == wanted
        turns.clear()


def test_what_gpus_kernels_hold_is_counted(monkeypatch):
    """A byte of an input, and three where int8 is rotated in a pass of its own; outputs of a turn."""
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    for kernel in kernels.FUSED:
        assert kernels.chunk_bytes(kernel, 4608, 12288, 3072) == 0
        assert kernels.chunk_bytes(kernel, 4608, 3072, 12288) == 4608 * 12288
        together = kernels.QUANTIZED // 12288 // 128 * 128
        assert kernels.chunk_bytes(kernel, 75600, 3072, 12288) == together * (12288 + 4 * 3072)
    assert kernels.chunk_bytes(kernels.int8, 4608, 6144, 24576) == 3 * 4608 * 24576
    assert kernels.chunk_bytes(kernels.float8, 4608, 6144, 24576) == 4608 * 24576


@torch.inference_mode()
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_products_hold_what_is_counted(kitchen, monkeypatch, dtype, is_scaled):
    """Some rows at a time, to the same values: a copy of all inputs is the largest tensor of a block."""
    weight = ours("fp8", theirs("fp8", numbers(256, 1024, seed=3, dtype=dtype)), dtype)
    if is_scaled:
        weight.packed.tensors["input_scale"] = torch.tensor(0.01)
    x = numbers(2, 150, 1024, seed=1, dtype=dtype)
    whole = weight.linear(x, None)
    monkeypatch.setattr(kernels, "CHUNK", 100 * 1024)
    with LiveMemory() as memory:
        out = weight.linear(x, None)
    assert out.equal(whole)
    held = 300 * 1024 + kernels.BYTES_PER_FLOAT8_VALUE * kernels.CHUNK
    assert memory.peak - out.nbytes <= kernels.chunk_bytes(kernels.float8, 300, 256, 1024) == held
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    assert weight.linear(x, None).equal(whole) or not is_scaled


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_blocks_without_fused_kernels_are_quantized_in_turns(kitchen, monkeypatch, kind):
    """In whole tiles of scales; the scale of all of them is taken before."""
    x, bias = numbers(3, 100, COLUMNS, seed=1), numbers(ROWS)
    weight = ours(kind, theirs(kind, numbers(ROWS, COLUMNS, seed=3)), torch.float32)
    name = f"quantize_{kind}"
    whole, call, rows = weight.linear(x, bias), getattr(kitchen, name), []
    monkeypatch.setattr(kitchen, name, lambda x, *a, **b: rows.append(len(x)) or call(x, *a, **b))
    monkeypatch.setattr(kernels, "BLOCKED", 200 * COLUMNS)
    assert weight.linear(x, bias).equal(whole) and rows == [128, 128, 44]
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    assert weight.linear(x, bias).equal(whole) and rows[3:] == [300]


def test_a_process_without_gpus_plans_for_ranks_with_kernels(kitchen, monkeypatch):
    """comfy-kitchen has no CUDA kernels where no GPU is to be seen, as where headers are read."""
    assert kernels.chunk_bytes(kernels.int8, 300, COLUMNS, ROWS) > 0
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert kernels.chunk_bytes(kernels.int8, 300, COLUMNS, ROWS) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.chunk_bytes(kernels.int8, 300, ROWS, COLUMNS) > 0
