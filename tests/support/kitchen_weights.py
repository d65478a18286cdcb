"""Quantized matrices of comfy-kitchen, and the same as the backend holds them."""

import torch

from backend.quantization import matmul
from backend.quantization.formats import FORMATS
from backend.quantization.kernels import MatmulChoice
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight

#: Format -> (comfy-kitchen's layout, its options, what files say of it).
ROTATED = {"convrot": True, "convrot_groupsize": 64}
LAYOUTS = {
    "int8": ("int8_tensorwise", "TensorWiseINT8Layout", {}),
    "int8 of rows": ("int8_tensorwise", "TensorWiseINT8Layout", {"per_channel": True}),
    "ConvRot": ("int8_tensorwise", "TensorWiseINT8Layout", {"per_channel": True, **ROTATED}),
    "fp8": ("float8_e4m3fn", "TensorCoreFP8Layout", {"scale": "recalculate"}),
    "mxfp8": ("mxfp8", "TensorCoreMXFP8Layout", {}),
    "nvfp4": ("nvfp4", "TensorCoreNVFP4Layout", {}),
}


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def theirs(kind: str, weight: torch.Tensor):
    """comfy-kitchen's QuantizedTensor of a matrix."""
    from comfy_kitchen.tensor import QuantizedTensor

    _, layout, options = LAYOUTS[kind]
    return QuantizedTensor.from_float(weight, layout, **options)


def ours(kind: str, quantized, dtype: torch.dtype, **more) -> PackedWeight:
    """The same matrix as a PackedWeight that multiplies natively."""
    import comfy_kitchen

    name, _, options = LAYOUTS[kind]
    values, params = quantized._qdata, quantized._params
    rows, columns = quantized.shape
    tensors = {"values": values, **more}
    if name in ("mxfp8", "nvfp4"):
        scales = params.block_scale if name == "nvfp4" else params.scale
        block = FORMATS[name].block({})
        tiles = scales.view(torch.uint8)
        shape = {"num_rows": rows, "num_cols": columns // block}
        tensors["block_scales"] = comfy_kitchen.from_blocked(tiles, **shape).contiguous()
        if name == "nvfp4":
            tensors["tensor_scale"] = params.scale.reshape(1)
    else:
        tensors["scale"] = (
            params.scale.reshape(-1, 1) if params.scale.numel() > 1 else params.scale.reshape(1)
        )
    settings = {"format": name, **{key: value for key, value in options.items() if "convrot" in key}}
    packed = Packed(FORMATS[name], settings, tensors, columns, (range(columns),))
    return PackedWeight(packed, dtype, MatmulChoice(matmul.RULES[name].kernel, ""))
