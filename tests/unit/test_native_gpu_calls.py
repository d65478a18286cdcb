"""What native products give comfy-kitchen's functions on a GPU, by the parameters of the installed ones.

Stand-ins for GPUs are CPU tensors that say they are CUDA's. comfy-kitchen quantizes and dequantizes on a CPU
too; its products of blocks and of int8 do not run there, so stand-ins compute what their documentation says.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch

from backend.quantization import kernels
from backend.quantization.formats import FORMATS, rotated
from backend.quantization.native_trial import examples
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight

kitchen = pytest.importorskip("comfy_kitchen")
CPU = torch.device("cpu")
#: More rows than a tile of cuBLAS' block scales has.
ROWS, COLUMNS = 160, 128


class OnGpu(torch.Tensor):
    """Operations on it are those of a CPU tensor, which their results are."""

    is_cuda = True
    device = SimpleNamespace(type="cuda")

    @classmethod
    def __torch_function__(cls, function, types, given=(), options=None):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*given, **(options or {}))


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of_blocks(kind: str) -> PackedWeight:
    """A weight whose blocks have unlike scales."""
    scales = numbers(ROWS, COLUMNS // (32 if kind == "mxfp8" else 16), seed=1).abs() + 0.1
    if kind == "mxfp8":
        values = numbers(ROWS, COLUMNS).to(torch.float8_e4m3fn)
        exponents = (scales.log2().round() + 127).to(torch.uint8)
        tensors = {"values": values, "block_scales": exponents}
    else:
        values = torch.randint(256, (ROWS, COLUMNS // 2), generator=torch.Generator().manual_seed(0))
        tensors = {
            "values": values.to(torch.uint8),
            "block_scales": scales.to(torch.float8_e4m3fn),
            "tensor_scale": torch.tensor([0.3]),
        }
    packed = Packed(FORMATS[kind], {"format": kind}, tensors, COLUMNS, (range(COLUMNS),))
    return PackedWeight(packed, torch.float32, kernels.MatmulChoice(None, ""))


def replaced(monkeypatch, name, body):
    """Have ``body`` compute what the installed function of that name is called for, by its parameters."""
    signature = inspect.signature(getattr(kitchen, name))
    calls = []

    def call(*given, **options):
        bound = signature.bind(*given, **options)
        bound.apply_defaults()
        calls.append(bound.arguments)
        return body(**bound.arguments)

    monkeypatch.setattr(kitchen, name, call)
    return calls


def blocks_of_nvfp4(
    a, b, tensor_scale_a, tensor_scale_b, block_scale_a, block_scale_b, bias, out_dtype, alpha
):
    x = kitchen.dequantize_nvfp4(a, tensor_scale_a, block_scale_a, torch.float32)
    weight = kitchen.dequantize_nvfp4(b, tensor_scale_b, block_scale_b, torch.float32)
    assert alpha is None
    return torch.nn.functional.linear(x, weight, bias).to(out_dtype)


def blocks_of_mxfp8(a, b, block_scale_a, block_scale_b, bias, out_dtype):
    x = kitchen.dequantize_mxfp8(a, block_scale_a, torch.float32)
    weight = kitchen.dequantize_mxfp8(b, block_scale_b, torch.float32)
    return torch.nn.functional.linear(x, weight, bias).to(out_dtype)


PRODUCTS = {"nvfp4": blocks_of_nvfp4, "mxfp8": blocks_of_mxfp8}


@pytest.mark.parametrize("tokens", [1, 21, 64])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_blocks_are_multiplied_as_on_a_cpu(kind, tokens, monkeypatch):
    """Where activations are quantized alike and what the blocks stand for is multiplied."""
    weight, bias = of_blocks(kind), numbers(ROWS, seed=2)
    x = numbers(2, tokens, COLUMNS, seed=3)
    multiply = getattr(kernels, kind)
    wanted = multiply(x, weight, bias, None)
    calls = replaced(monkeypatch, f"scaled_mm_{kind}", PRODUCTS[kind])
    found = multiply(x.as_subclass(OnGpu), weight, bias, None)
    assert len(calls) == 1 and found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("is_rotated", [False, True])
def test_int8_is_multiplied_in_one_call(is_rotated, monkeypatch):
    """Which rotates activations, quantizes them and adds the bias."""

    def int8_linear(x, weight, weight_scale, bias, out_dtype, convrot, convrot_groupsize, **others):
        assert convrot == is_rotated and not any(others.values())
        seen = rotated(x, convrot_groupsize) if convrot else x
        return torch.nn.functional.linear(seen, weight * weight_scale, bias).to(out_dtype)

    weight = examples("int8_tensorwise", torch.float32, CPU)[is_rotated]
    size = weight.shape[1]
    x, bias = numbers(3, size, seed=3), numbers(size, seed=2)
    calls = replaced(monkeypatch, "int8_linear", int8_linear)
    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    found = kernels.int8(x, weight, bias, None)
    assert len(calls) == 1
    assert torch.allclose(found, torch.nn.functional.linear(x, weight.dequantized(), bias), atol=1e-3)
