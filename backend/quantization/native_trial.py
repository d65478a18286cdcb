"""Tries native products before a model is loaded: whether a device multiplies a format depends on torch,
cuBLAS, comfy-kitchen and the GPU together, and only a product shows it.

All ranks agree on what any of them refuses: those that add up products must multiply alike. Products of other
shapes that still fail are left by PackedWeight.linear, where no rank waits for another.
"""

import traceback
from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import reason
from ..hardware.device_memory import check_not_lost, is_out_of_memory
from ..runtime.callbacks import unchanged
from .formats import FORMATS
from .kernels import MatmulChoice
from .matmul import RULES, Product, why_not_native
from .packed import Packed
from .packed_weight import PackedWeight, free_scratch

#: Rows and columns of the weight that is tried, and tokens: one, as a timestep has, several blocks of 16, and
#: more than 128, from which comfy-kitchen has another product of int8 on Turing.
SIZE = 256
TOKENS = (1, 48, 256)
#: Native products are off by 0.008 (int8), 0.026 (fp8, mxfp8) and 0.095 (nvfp4) of these values, measured on
#: a CPU. So much more is a kernel that fails without saying so.
MAX_ERROR = 0.3
#: Whether this rank's inputs are whole, or cut over ranks whose largest values it is told.
MAX_OVER_RANKS_CASES = (None, unchanged)


def agree(
    products: Iterable[Product], device: torch.device, gather: Callable[[list], list[list]]
) -> tuple[dict[Product, str], list[str]]:
    """Return the ``products`` that any rank refuses, with the first such rank, its GPU and why; and for each
    rank why it could try none, empty where it could. ``gather``: a value that JSON holds -> those of all
    ranks. Raises RuntimeError on a rank whose device is lost, once all have gathered."""
    own: dict[Product, str] = {}
    failure = ""
    name = "CPU"
    may_be_lost = False
    try:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else name
        own = refusals(products, device)
    except Exception as error:  # out of memory, a device that is lost: the other ranks wait for this one
        traceback.print_exc()
        failure = reason(error)
        may_be_lost = not is_out_of_memory(error)
    everyone = gather([[[*product, why] for product, why in own.items()], failure, name])
    if may_be_lost:  # this rank ends now, and not in somebody's next request
        check_not_lost(device, failure)
    merged: dict[Product, str] = {}
    for rank, (refused, _, name) in enumerate(everyone):
        where = f"on rank {rank} ({name}) " if len(everyone) > 1 else ""
        for kind, dtype, why in refused:
            merged.setdefault((kind, dtype), where + why)
    return merged, [why for _, why, _ in everyone]


def refusals(products: Iterable[Product], device: torch.device) -> dict[Product, str]:
    """Return why this rank's ``device`` does not multiply natively, of those ``products`` that it does not.
    Raises what says that memory ran out or that the device is lost."""
    found = {(kind, dtype): _refusal(kind, dtype, device) for kind, dtype in products}
    return {product: why for product, why in found.items() if why}


@cache
def _refusal(kind: str, dtype: str, device: torch.device) -> str:
    """Return why a format is not multiplied natively in ``dtype``; empty where it is."""
    why = why_not_native(RULES[kind], device)
    if why:
        return why
    try:
        error = max(_error(weight) for weight in examples(kind, getattr(torch, dtype), device))
    except Exception as failed:
        if is_out_of_memory(failed):
            raise
        why = f"its product failed ({reason(failed, 160)})"
        lost = f"a trial of native {kind} products lost the GPU: {why}"
        check_not_lost(device, f"{lost}; set matmul of Load Parallel DiT to weight only")
        return why
    finally:
        free_scratch()  # where a CPU's weight is dequantized: it is no request's
    return "" if error <= MAX_ERROR else f"its product is off by {error:.2g} of its values"


@torch.inference_mode()
def _error(weight: PackedWeight) -> float:
    """Return the largest relative error of native products against those by the dequantized weight."""
    kernel = weight.choice.kernel
    assert kernel is not None, "given below"
    plain = weight.packed.dequantize(weight.dtype)
    errors = [0.0]
    for tokens in TOKENS:
        x = _numbers(tokens, SIZE).to(weight.device, weight.dtype)
        for bias in (None, _numbers(SIZE).to(weight.device, weight.dtype)):
            wanted = F.linear(x, plain, bias).float()
            for max_over_ranks in MAX_OVER_RANKS_CASES:
                off = kernel(x, weight, bias, max_over_ranks).float() - wanted
                errors.append((off.norm() / wanted.norm()).item())
    return max(errors) if all(error == error for error in errors) else float("inf")


def examples(kind: str, dtype: torch.dtype, device: torch.device, size: int = SIZE) -> list[PackedWeight]:
    """Return square weights of a format that multiply natively; of int8 a plain and a rotated one."""
    settings: list[dict] = [{"format": kind}]
    if kind == "int8_tensorwise":
        settings.append({**settings[0], "convrot": True, "convrot_groupsize": SIZE})
    tensors = {role: tensor.to(device) for role, tensor in _stored(kind, size).items()}
    columns = (size, (range(size),))
    choice = MatmulChoice(RULES[kind].kernel, "")
    return [PackedWeight(Packed(FORMATS[kind], each, tensors, *columns), dtype, choice) for each in settings]


def _stored(kind: str, size: int) -> dict[str, Tensor]:
    """Return what a file stores of a weight whose values are near 1 (quantization/formats.py)."""
    normal = _numbers(size, size)
    one = torch.ones(1)
    if kind == "int8_tensorwise":
        scale = normal.abs().amax(dim=1, keepdim=True) / 127
        return {"values": (normal / scale).round().to(torch.int8), "scale": scale}
    if kind == "float8_e4m3fn":
        return {"values": normal.to(torch.float8_e4m3fn), "scale": one}
    if kind == "mxfp8":
        exponents = torch.full((size, size // 32), 127, dtype=torch.uint8)  # of 1
        return {"values": normal.to(torch.float8_e4m3fn), "block_scales": exponents}
    bits = torch.randint(256, (size, size // 2), generator=torch.Generator().manual_seed(0))
    scales = torch.ones(size, size // 16).to(torch.float8_e4m3fn)
    return {"values": bits.to(torch.uint8), "block_scales": scales, "tensor_scale": one}


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
