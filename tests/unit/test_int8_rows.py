"""int8 products of columns that are cut over ranks, by a kernel that scales the sums before it writes them: a
stand-in, which the CPU has none of."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from live_memory import LiveMemory

from backend.loading.files.safetensors_files import StoredSize
from backend.parallel.matrix_cuts import Shard
from backend.parallel.mesh import Axis
from backend.parallel.sequence import Span
from backend.quantization import int8_rows, kernels, native_trial
from backend.quantization.formats import FORMATS, rotated
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight, multiplier
from backend.rank_plan.weights import HeldParameter, held_parameters, planned_scratch_bytes

kitchen = pytest.importorskip("comfy_kitchen")
CPU = torch.device("cpu")
SIZE = native_trial.SIZE
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def weight_of(is_rotated: bool, dtype: torch.dtype) -> PackedWeight:
    return native_trial.examples("int8_tensorwise", dtype, CPU)[is_rotated]


def others(amax: torch.Tensor) -> torch.Tensor:
    """The largest values of all ranks: of every second row those of another one."""
    return torch.where(torch.arange(len(amax)).view(-1, 1) % 2 == 0, amax * 2, amax)


@pytest.fixture
def fused(monkeypatch):
    """The tokens of each product by comfy-kitchen's kernel."""
    tokens, mm_int8 = [], kitchen.mm_int8

    def product(x_int8, weight_int8, x_scale, weight_scale, bias, out_dtype):
        assert x_int8.dtype == torch.int8 and x_int8.is_contiguous() and weight_int8.is_contiguous()
        assert x_scale.shape == (len(x_int8), 1) and weight_scale.shape == (len(weight_int8),)
        assert x_scale.dtype == weight_scale.dtype == torch.float32 and bias is None
        if any(size % 4 for size in weight_int8.shape):  # as cuBLAS does
            raise RuntimeError("INT8 GEMM not supported on this GPU for these dimensions")
        tokens.append(len(x_int8))
        sums = mm_int8(x_int8, weight_int8.t()).float()
        return (sums * (x_scale * weight_scale)).to(out_dtype)

    monkeypatch.setattr(kernels, "_scaled_product", lambda kind: product)
    return tokens


@pytest.fixture(params=[(1, SIZE), (2, 21, SIZE)], ids=["a timestep", "tokens"])
def shape(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_rotated", [False, True], ids=["int8", "ConvRot"])
@torch.inference_mode()
def test_cut_inputs_are_quantized_bit_by_bit_as_without_the_kernel(
    monkeypatch, fused, shape, is_rotated, dtype
):
    """Rotated once, and compared once; inputs stay as they are."""
    x = numbers(*shape, dtype=dtype)
    x[..., :7, 0] = 9  # the value whose place the scale takes
    given, turns = x.clone(), []
    weight, bias = weight_of(is_rotated, dtype), numbers(SIZE, dtype=dtype)
    monkeypatch.setattr(int8_rows, "rotated", lambda x, size: turns.append(size) or rotated(x, size))
    found = weight.linear(x, bias, others)
    count = x.shape[:-1].numel()
    assert fused == [count] and [each for each in turns if each] == [SIZE] * is_rotated
    monkeypatch.setattr(kernels, "_scaled_product", lambda kind: None)
    assert found.equal(weight.linear(x, bias, others)) and x.equal(given) and fused == [count]
    assert not found.equal(weight.linear(x, bias, lambda amax: amax))


@pytest.mark.parametrize("rows, columns, is_fused", [(24, 96, True), (24, 99, False), (22, 96, False)])
@torch.inference_mode()
def test_widths_that_the_kernel_refuses_take_rows_in_turns(monkeypatch, fused, rows, columns, is_fused):
    """Uneven cuts have any: 8960 columns over 3 ranks. Another rank that succeeds would wait for this one."""
    values = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    tensors = {"values": values, "scale": torch.ones(rows, 1)}
    kind = "int8_tensorwise"
    packed = Packed(FORMATS[kind], {"format": kind}, tensors, columns, (range(columns),))
    weight = PackedWeight(packed, torch.bfloat16, kernels.MatmulChoice(kernels.int8, ""))
    x, compared = numbers(70, columns, dtype=torch.bfloat16), []
    monkeypatch.setattr(kernels, "CHUNK", 32 * columns)
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    found = weight.linear(x, None, lambda amax: compared.append(amax.shape) or others(amax))
    assert fused == [70] * is_fused and compared == [(70, 1)]
    counted = kernels.chunk_bytes(kernels.int8, 70, rows, columns, compared=2)
    assert counted == (5 * 70 if is_fused else 10 * 32) * columns
    monkeypatch.setattr(kernels, "_scaled_product", lambda kind: None)
    assert found.equal(weight.linear(x, None, others))


@pytest.mark.parametrize("is_rotated", [False, True], ids=["int8", "ConvRot"])
@pytest.mark.parametrize("is_fused", [False, True])
@torch.inference_mode()
def test_halves_are_bit_by_bit_the_whole(monkeypatch, fused, is_fused, is_rotated):
    """Their largest values are compared at once: a message between the sums would wait for the first."""
    if not is_fused:
        monkeypatch.setattr(kernels, "_scaled_product", lambda kind: None)
        monkeypatch.setattr(kernels, "CHUNK", 32 * SIZE)
    x, compared = numbers(75, SIZE, dtype=torch.bfloat16), []
    weight = weight_of(is_rotated, x.dtype)
    whole = weight.linear(x, None, others)
    fused.clear()
    multiply = multiplier(weight, x, lambda amax: compared.append(len(amax)) or others(amax))
    out = torch.empty(75, SIZE, dtype=x.dtype)
    for half in (slice(0, 38), slice(38, 75)):
        multiply(half, out[half])
    assert out.equal(whole) and compared == [75] and fused == [38, 37] * is_fused
    monkeypatch.setattr(kernels, "COMPARED", 32 * SIZE)  # too many to keep
    assert weight.linear(x, None, others).equal(whole)
    assert fused[2:] == [32, 32, 11] * is_fused


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_rotated", [False, True], ids=["int8", "ConvRot"])
@torch.inference_mode()
def test_what_is_held_is_counted(monkeypatch, is_rotated, dtype):
    """Inputs in memory of their own, and quantized, and outputs of a chunk; besides, a few numbers of each
    token and each output."""

    def quantize(rows):
        return torch.empty_like(rows, dtype=torch.int8), torch.empty(len(rows), 1)

    def product(x_int8, weight_int8, x_scale, weight_scale, bias, out_dtype):
        return torch.empty(len(x_int8), len(weight_int8), dtype=out_dtype)

    tokens = 600
    x, weight = numbers(tokens, SIZE, dtype=dtype), weight_of(is_rotated, dtype)
    rotated(x[:1], SIZE)  # whose matrix stays
    monkeypatch.setattr(kitchen, "quantize_int8_rowwise", quantize)
    monkeypatch.setattr(kernels, "_scaled_product", lambda kind: product)
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    few = 24 * tokens + 4 * SIZE + hadamard_bytes(dtype)
    for values, some in ((kernels.COMPARED, tokens), (96 * SIZE, 96)):
        monkeypatch.setattr(kernels, "COMPARED", values)
        with LiveMemory() as memory:
            out = weight.linear(x, None, others)
        held = kernels.chunk_bytes(kernels.int8, tokens, SIZE, SIZE, dtype.itemsize)
        assert held == some * SIZE * (2 * dtype.itemsize + 1)
        assert memory.peak - out.nbytes <= held + few


@torch.inference_mode()
def test_scales_are_those_of_the_largest_values(monkeypatch, fused):
    """Not those of comfy-kitchen's kernel, which leaves NaN out and is off by a bit: NaN and infinity of any
    rank's columns reach the output, as they do without the kernel."""
    quantize = kitchen.quantize_int8_rowwise

    def quantized(rows):
        values, scales = quantize(rows.nan_to_num(posinf=9.0))
        return values, scales.nextafter(torch.zeros(()))

    x, weight = numbers(6, SIZE, dtype=torch.bfloat16), weight_of(False, torch.bfloat16)
    for column in (0, 5):
        bad = x.clone()
        bad[1, column], bad[3, column] = float("nan"), float("inf")
        monkeypatch.setattr(kitchen, "quantize_int8_rowwise", quantized)
        found = weight.linear(bad, None, others)
        assert found.isfinite().all(1).tolist() == [True, False, True, False, True, True]
        monkeypatch.setattr(kitchen, "quantize_int8_rowwise", quantize)
        assert found[::2].equal(weight.linear(bad, None, others)[::2])
        _, scales = int8_rows.under_scales(x.clone(), int8_rows.row_amax(x), quantized)
        assert scales.equal(int8_rows.scales_of(int8_rows.row_amax(x)))


def test_layers_whose_columns_are_cut_count_what_they_hold(monkeypatch):
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    held = HeldParameter("to_out", 0, [], torch.bfloat16, kernel=kernels.int8, matrix=(64, 32))
    assert planned_scratch_bytes([held], 100) == 0
    assert planned_scratch_bytes([held, replace(held, compared=2)], 100) == 5 * 100 * 64


@pytest.mark.parametrize("stays", [False, True])
def test_what_is_compared_has_the_dtype_of_the_layer(stays):
    """Of a bf16 model too, where the family keeps the layer in float32."""
    whole = Span(0, 64)
    checkpoint = SimpleNamespace(
        parameters={"to_out.weight": (0, torch.nn.Linear)},
        shapes={"to_out.weight": (64, 64)},
        stored=lambda name: SimpleNamespace(packed_sizes=lambda cut: [StoredSize(64, 64 * 32)]),
        family=SimpleNamespace(
            build=SimpleNamespace(dtype_of=lambda name, dtype: torch.float32 if stays else dtype)
        ),
    )
    cut = Shard((whole,), (Span(0, 32),), reduce=Axis(group=None, rank=0, size=2, ranks=()))
    choice = kernels.MatmulChoice(kernels.int8, "")
    [held] = held_parameters(checkpoint, {"to_out": cut}, torch.bfloat16, {"to_out.weight": choice})
    assert held.compared == (4 if stays else 2)


def hadamard_bytes(dtype: torch.dtype) -> int:
    """The matrix that rotates, in the type of the inputs."""
    return SIZE**2 * dtype.itemsize if dtype != torch.float32 else 0


def test_a_kernel_with_other_arguments_is_not_used(monkeypatch):
    """It is none of comfy-kitchen's public functions."""
    from comfy_kitchen.backends import cuda

    def product(x_int8, weight_int8, scales):
        raise AssertionError

    found = []
    for each in (getattr(cuda, int8_rows.SCALED_PRODUCT), product, None):
        monkeypatch.setattr(cuda, int8_rows.SCALED_PRODUCT, each)
        int8_rows.scaled_product.cache_clear()
        found.append(int8_rows.scaled_product())
    int8_rows.scaled_product.cache_clear()
    assert found[0] is not None and found[1:] == [None, None]


def test_without_the_quantizer_that_is_called_there_is_no_kernel(monkeypatch):
    """The CUDA backend has one of the same name."""
    int8_rows.scaled_product.cache_clear()
    assert int8_rows.scaled_product() is not None
    monkeypatch.delattr(kitchen, "quantize_int8_rowwise")
    int8_rows.scaled_product.cache_clear()
    found = int8_rows.scaled_product()
    int8_rows.scaled_product.cache_clear()
    assert found is None


def test_devices_without_the_kernel_take_rows_in_turns(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    assert kernels._scaled_product("cuda") is not None and kernels._scaled_product("cpu") is None
    counted = kernels.chunk_bytes(kernels.int8, 300, 256, 256, compared=2)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kernels._scaled_product("cuda") is None
    assert kernels.chunk_bytes(kernels.int8, 300, 256, 256) == 0
    assert kernels.chunk_bytes(kernels.int8, 300, 256, 256, compared=2) == 10 * 300 * 256 > counted


@torch.inference_mode()
def test_gpus_before_ampere_take_rows_in_turns(request, monkeypatch, fused):
    """comfy-kitchen's kernel holds all sums as integers there."""
    x, bias = numbers(2, 45, SIZE, dtype=torch.bfloat16), numbers(SIZE, dtype=torch.bfloat16)
    weight, rows, int8_linear = weight_of(True, x.dtype), [], kitchen.int8_linear
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    monkeypatch.setattr(
        kitchen, "int8_linear", lambda x, *a, **b: rows.append(len(x)) or int8_linear(x, *a, **b)
    )
    monkeypatch.setattr(kernels, "CHUNK", 32 * SIZE)
    found, counted = [], []
    request.addfinalizer(kernels._keeps_sums.cache_clear)
    for capability in ((8, 0), (7, 5)):
        kernels._keeps_sums.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        found.append((weight.linear(x, bias), weight.linear(x, None, others)))
        counted.append(kernels.chunk_bytes(kernels.int8, 90, SIZE, SIZE))
    assert rows == [90, 32, 32, 26] == fused and counted == [0, 10 * kernels.CHUNK]
    assert all(one.equal(two) for one, two in zip(*found))
