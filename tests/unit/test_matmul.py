"""How quantized layers multiply: native products bit by bit comfy-kitchen's own, and which layers are given
them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kitchen_weights import LAYOUTS, numbers, ours, theirs

from backend.quantization import kernels
from backend.quantization.added_products import LowRank, Scales
from backend.quantization.formats import hadamard
from backend.quantization.kernels import MatmulChoice
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight, can_multiply_in_chunks, multiplier

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ROWS, COLUMNS = 96, 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def product(kind: str, x: torch.Tensor, quantized, bias, scale=None) -> torch.Tensor:
    """comfy-kitchen's own x W^T + bias, with activations quantized as ComfyUI does."""
    from comfy_kitchen.tensor import QuantizedTensor

    name, layout, _ = LAYOUTS[kind]
    if name == "int8_tensorwise":
        return F.linear(x, quantized, bias)
    rows = x.reshape(-1, COLUMNS)
    options = {"scale": torch.ones(()) if scale is None else scale} if name == "float8_e4m3fn" else {}
    options = {"scale": scale} if name == "nvfp4" and scale is not None else options
    inputs = QuantizedTensor.from_float(rows, layout, **options)
    if name == "float8_e4m3fn":
        out = F.linear(inputs, quantized, bias)
    else:  # torch's CPU kernel takes no scales in tiles: what these blocks stand for
        out = F.linear(inputs.dequantize()[: len(rows)], quantized.dequantize(), bias)
    return out.reshape(*x.shape[:-1], ROWS)


@pytest.mark.parametrize("size", [1.0, 1e-3], ids=["inputs of 1", "small inputs"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
@torch.inference_mode()
def test_a_native_product_is_comfy_kitchens(kitchen, kind, dtype, size):
    """Small ones have scales that float16 has as subnormal numbers alone."""
    x = numbers(2, 21, COLUMNS, seed=1, dtype=dtype) * size
    bias = numbers(ROWS, seed=2, dtype=dtype)
    quantized = theirs(kind, numbers(ROWS, COLUMNS, seed=3, dtype=dtype))
    weight = ours(kind, quantized, dtype)
    for own in (bias, None):
        want = product(kind, x, quantized, own)
        found = weight.linear(x, own)
        assert found.shape == (2, 21, ROWS) and found.dtype == dtype and torch.equal(found, want)
    # inputs are quantized: not what the weight alone makes of them
    assert not torch.allclose(
        found, F.linear(x, weight.packed.dequantize(dtype)), rtol=1e-4, atol=1e-4 * size
    )


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
@torch.inference_mode()
def test_inputs_are_quantized_under_the_files_scale(kitchen, kind):
    x = numbers(21, COLUMNS, seed=1)
    quantized = theirs(kind, numbers(ROWS, COLUMNS, seed=3))
    scale = torch.tensor([0.013])
    found = ours(kind, quantized, x.dtype, input_scale=scale).linear(x, None)
    assert torch.equal(found, product(kind, x, quantized, None, scale[0]))
    assert not torch.equal(found, ours(kind, quantized, x.dtype).linear(x, None))


@pytest.mark.parametrize("kind", LAYOUTS)
@torch.inference_mode()
def test_smoothed_inputs(kitchen, kind):
    """pre_quant_scale multiplies activations before they are quantized."""
    x = numbers(21, COLUMNS, seed=1)
    smoothing = torch.linspace(0.5, 2, COLUMNS)
    quantized = theirs(kind, numbers(ROWS, COLUMNS, seed=3))
    found = ours(kind, quantized, x.dtype, smoothing=smoothing).linear(x, None)
    assert torch.equal(found, product(kind, x * smoothing, quantized, None))


@pytest.mark.parametrize("kind", LAYOUTS)
@torch.inference_mode()
def test_inputs_are_quantized_after_magnitudes_of_columns(kitchen, kind):
    """As inputs with the factors in them are, and outputs have those of rows."""
    x, rows, columns = numbers(20, COLUMNS, seed=1), torch.linspace(0.5, 2, ROWS), torch.rand(COLUMNS) + 0.5
    quantized = theirs(kind, numbers(ROWS, COLUMNS, seed=3))
    weight = ours(kind, quantized, x.dtype)
    weight.set_adapters({}, scales=Scales(rows, columns))
    wanted = (product(kind, x * columns, quantized, None).float() * rows).to(x.dtype)
    assert torch.equal(weight.linear(x, None), wanted)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", LAYOUTS)
@torch.inference_mode()
def test_halves_of_the_tokens_are_multiplied_in_turn(kitchen, kind, native):
    """Ranks sum one half while they multiply the other: where no scale is of both."""
    x = numbers(22, COLUMNS, seed=1)
    weight = ours(kind, theirs(kind, numbers(ROWS, COLUMNS, seed=3)), x.dtype)
    if not native:
        weight.choice = MatmulChoice(None, "")
    lora = LowRank(numbers(ROWS, 4, seed=4), numbers(4, COLUMNS, seed=5), 0.5)
    weight.set_adapters({"a lora": lora}, scales=Scales(columns=torch.linspace(0.5, 2, COLUMNS)))
    assert can_multiply_in_chunks(weight) == (not native or kind != "nvfp4")
    if can_multiply_in_chunks(weight):
        out, compared = torch.empty(22, ROWS), []
        multiply = multiplier(weight, x, lambda amax: compared.append(len(amax)) or amax)
        for half in (slice(0, 11), slice(11, 22)):
            multiply(half, out[half])
        whole = weight.linear(x, None)
        assert (out - whole).norm() <= 1e-6 * whole.norm()
        assert compared == ([22] if native and LAYOUTS[kind][0] == "int8_tensorwise" else [])


@pytest.mark.parametrize("kind", LAYOUTS)
@torch.inference_mode()
def test_a_rank_without_tokens(kitchen, kind):
    weight = ours(kind, theirs(kind, numbers(ROWS, COLUMNS)), torch.float32)
    assert weight.linear(numbers(2, 0, COLUMNS), numbers(ROWS)).shape == (2, 0, ROWS)


@torch.inference_mode()
def test_a_lora_is_added_to_the_native_product(kitchen):
    x = numbers(21, COLUMNS, seed=1)
    quantized = theirs("ConvRot", numbers(ROWS, COLUMNS, seed=3))
    weight = ours("ConvRot", quantized, x.dtype)
    up, down = numbers(ROWS, 4, seed=4), numbers(4, COLUMNS, seed=5)
    weight.set_adapters({"a lora": LowRank(up, down, 0.5)})
    want = product("ConvRot", x, quantized, None) + 0.5 * x @ down.T @ up.T
    assert torch.allclose(weight.linear(x, None), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int8 of rows", "ConvRot", "nvfp4"])
@torch.inference_mode()
def test_cut_inputs_are_quantized_as_whole_ones(kitchen, kind, dtype):
    """Products of two ranks' columns, under scales of whole rows, add up to the product of one process; under
    scales of their own they do not."""
    x = numbers(21, COLUMNS, seed=1, dtype=dtype)
    x[:, :128] *= 7  # so that the ranks' own scales differ
    quantized = theirs(kind, numbers(ROWS, COLUMNS, seed=3, dtype=dtype))
    whole = ours(kind, quantized, dtype)
    want = whole.linear(x, None).float()

    def add_up(is_agreed: bool):
        total = torch.zeros(21, ROWS)
        for columns in (slice(0, 128), slice(128, 256)):
            piece = replace(
                whole.packed, columns=128, column_runs=(range(128),), tensors=cut(whole.packed, columns)
            )
            weight = PackedWeight(piece, dtype, whole.choice)

            def max_over_ranks(own):
                return torch.maximum(own, largest_of_rows(x, own, whole.packed)) if is_agreed else own

            total += weight.linear(x[:, columns], None, max_over_ranks).float()
        return total

    tolerance = {"rtol": 1e-5, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2.0}
    assert torch.allclose(add_up(True), want, **tolerance)
    if dtype == torch.float32:
        assert not torch.allclose(add_up(False), want, **tolerance)


def cut(packed: Packed, columns: slice) -> dict:
    """Its tensors of these columns."""
    count = packed.columns
    return {
        role: value[:, columns.start * value.shape[1] // count : columns.stop * value.shape[1] // count]
        if role in ("values", "block_scales")
        else value
        for role, value in packed.tensors.items()
    }


def largest_of_rows(x: torch.Tensor, own: torch.Tensor, packed: Packed) -> torch.Tensor:
    """What an all-reduce of absolute maxima would give: of whole rows, rotated as the weight is."""
    if packed.settings.get("convrot"):
        x = (x.unflatten(-1, (-1, 64)) @ hadamard(64, x.device).to(x.dtype)).flatten(-2)
    return x.abs().amax(dim=-1, keepdim=True) if own.ndim else x.abs().amax()


@torch.inference_mode()
def test_a_rank_whose_inputs_are_all_zero(kitchen):
    """As of a conditioning that is zeroed out; blocks are divided by the largest of all."""
    bias = numbers(ROWS)
    weight = ours("nvfp4", theirs("nvfp4", numbers(ROWS, COLUMNS, seed=3)), torch.float32)
    assert weight.linear(torch.zeros(4, COLUMNS), bias).equal(bias.expand(4, -1))


@pytest.mark.parametrize("dtype, inside", [(torch.float32, False), (torch.bfloat16, True)])
def test_cublas_is_given_no_bias_in_float32(dtype, inside):
    bias = numbers(ROWS, dtype=dtype)
    found = kernels._bias_where(torch.empty(1, COLUMNS, dtype=dtype, device="meta"), bias)
    assert found == ((bias, None) if inside else (None, bias))
