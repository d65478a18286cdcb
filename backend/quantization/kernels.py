"""Multiplications of quantized weights by activations that are quantized too, as in ComfyUI, by the kernels
of comfy-kitchen (Comfy-Org, Apache-2.0), which is optional and imported at the first use."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import reason
from ..protocol.load_choices import MATMULS
from ..runtime.install_command import install_command
from .formats import rotation
from .int8_rows import Int8Rows, is_aligned, rows_at_once, scaled_product

if TYPE_CHECKING:
    from .packed_weight import PackedWeight

#: Largest absolute values on this rank -> those over all ranks among which a layer's inputs are cut.
MaxOverRanks = Callable[[Tensor], Tensor]
#: Smoothed x (..., columns), weight, bias, ``max_over_ranks`` where inputs are cut -> x W^T + bias (...,
#: rows), in the dtype of x.
Kernel = Callable[[Tensor, "PackedWeight", Tensor | None, MaxOverRanks | None], Tensor]
#: How layers can multiply, the choices of LoadParallelDiT's ``matmul``.
AUTO, WEIGHT_ONLY, NATIVE = MATMULS
#: What is called of comfy-kitchen.
CALLED = (
    *("int8_linear", "mm_int8", "quantize_per_tensor_fp8", "to_blocked", "list_backends"),
    *("quantize_mxfp8", "dequantize_mxfp8", "scaled_mm_mxfp8"),
    *("quantize_nvfp4", "dequantize_nvfp4", "scaled_mm_nvfp4"),
)
#: CUDA from which comfy-kitchen's own CUDA kernels are used; before, its eager backend, which calls cuBLAS.
CUDA = 13
#: Values of an integer product's inputs or outputs that are scaled at once, and of activations whose blocks
#: are quantized at once, to bound memory; and the bytes that each of them takes.
CHUNK, BYTES_PER_CHUNKED_VALUE = 1 << 23, 10
BYTES_PER_FLOAT8_VALUE = 5
BLOCKED, BYTES_PER_BLOCKED_VALUE = 1 << 24, 25
#: Values of an int8 product's inputs or outputs up to which inputs that ranks compare are rotated once.
COMPARED = 1 << 25
#: Values of inputs wider than outputs that are quantized at once: the copy can be the largest moment of a
#: block. It takes a byte a value, and three where int8 has too many columns to be rotated in the same pass.
QUANTIZED, ROTATED_IN_ONE_PASS = 1 << 27, 1 << 14
#: Rows of a tile of cuBLAS' block scales.
BLOCK_ROWS = 128
#: Largest values of the formats.
MAX_E4M3, MAX_E2M1 = 448, 6


@dataclass(frozen=True)
class MatmulChoice:
    """How a layer multiplies. kernel: None for the dequantized weight; why: in reports; dequantizes: whether
    the weight is dequantized all the same, where a device has no product of the format."""

    kernel: Kernel | None
    why: str
    dequantizes: bool = False

    @property
    def needs_scratch(self) -> bool:
        """Return whether the weight is dequantized to be multiplied."""
        return self.kernel is None or self.dequantizes

    def __str__(self) -> str:
        return f"{NATIVE if self.kernel else WEIGHT_ONLY}: {self.why}"


@cache
def kitchen() -> tuple[ModuleType | None, str]:
    """Return comfy-kitchen with the backends that ComfyUI enables by default, or None and why."""
    if importlib.util.find_spec("comfy_kitchen") is None:
        return None, "comfy-kitchen is not installed"
    try:
        import comfy_kitchen  # pyright: ignore[reportMissingImports]  # optional
    except (ImportError, OSError) as error:  # compiled for another torch
        return None, f"comfy-kitchen cannot be imported ({reason(error)})"
    missing = [name for name in CALLED if not hasattr(comfy_kitchen, name)]
    if missing:
        return None, f"comfy-kitchen is too old (it has no {missing[0]})"
    comfy_kitchen.disable_backend("triton")
    if _cuda_version() < CUDA:
        comfy_kitchen.disable_backend("cuda")
    return comfy_kitchen, ""


def remedy() -> str:
    """Say how to install or update comfy-kitchen."""
    return f"run {install_command(['comfy-kitchen'], upgrade=True)}"


def int8(
    x: Tensor, weight: "PackedWeight", bias: Tensor | None, max_over_ranks: MaxOverRanks | None
) -> Tensor:
    """Multiply under one scale of activations a row, rotated (ConvRot) as the weight is."""
    packed = weight.packed
    values = packed.tensors["values"]
    if max_over_ranks is None and _fuses("int8_linear"):
        size = rotation(packed.settings)
        scale = packed.tensors["scale"].float()
        rotation_options = {"convrot": size is not None, "convrot_groupsize": size or 256}
        rows = _rows(x)

        def fused(chunk: slice) -> Tensor:
            return _kitchen().int8_linear(rows[chunk], values, scale, bias, x.dtype, **rotation_options)

        step = rows_at_once(CHUNK, values) if _keeps_sums() else _quantized_rows(values.shape, len(rows))
        product, added = fused, None
    else:
        product, step = _int8_product(x, weight, max_over_ranks)
        added = bias
    return _in_chunks(x, columns=len(values), bias=added, step=step, product=product)


def int8_multiplier(
    x: Tensor, weight: "PackedWeight", max_over_ranks: MaxOverRanks | None
) -> Callable[[slice, Tensor], None]:
    """Return what writes the products of some of the inputs x, (tokens, columns), to memory that is given,
    each once. Ranks compare the largest values of all of them here."""
    product, step = _int8_product(x, weight, max_over_ranks)

    def multiply(some: slice, out: Tensor):
        for start in range(some.start, some.stop, step):
            chunk = slice(start, min(start + step, some.stop))
            out[chunk.start - some.start : chunk.stop - some.start] = product(chunk)

    return multiply


@cache
def _keeps_sums() -> bool:
    """Return whether comfy-kitchen's int8 product may hold all sums before it scales them: before Ampere."""
    return torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() < (8, 0)


@cache
def _fuses(name: str) -> bool:
    """Return whether comfy-kitchen has a kernel of that name for these GPUs: without it kitchen holds all
    that is in between at once, several times input and output, and copies an int8 weight at each product."""
    return not small_kernels(name)


def _may_fuse() -> bool:
    """Return whether ranks may have kernels that this process, which is given no GPU, cannot find: it plans
    for them."""
    return _cuda_version() >= CUDA and not torch.cuda.is_available()


def _cuda_version() -> int:
    return int((torch.version.cuda or "0").partition(".")[0])


def small_kernels(name: str) -> str:
    """Return why comfy-kitchen has no kernel of that name for these GPUs but takes torch's; empty: it has."""
    module, missing = kitchen()
    if module is None:
        return missing
    state = module.list_backends().get("hip" if torch.version.hip else "cuda", {})
    if state.get("disabled"):
        return f"torch is for CUDA {torch.version.cuda} and comfy-kitchen's own kernels for {CUDA}"
    if name not in state.get("capabilities", ()):
        return state.get("unavailable_reason") or f"comfy-kitchen has no {name} for it"
    return ""


def chunk_bytes(kernel: Kernel | None, tokens: int, rows: int, columns: int, compared: int = 0) -> int:
    """Count what a product with a weight of rows x columns holds for a moment besides its output.
    ``compared``: bytes of an input value where ranks compare the largest ones, else 0. A process that is
    given no GPU plans for Ampere and later ones; ranks count the turns of GPUs before."""
    if kernel not in FUSED:
        return 0
    values = tokens * max(rows, columns)
    at_once = _may_fuse() or (_fuses(FUSED[kernel]) and not (kernel is int8 and _keeps_sums()))
    together = _quantized_rows((rows, columns), tokens)
    of_a_turn = 4 * rows * together if together < tokens else 0  # outputs, in float32 at most
    if at_once and not (kernel is int8 and compared):
        copies = 3 if kernel is int8 and columns > ROTATED_IN_ONE_PASS else 1
        return (copies * together * columns + of_a_turn) * (columns > rows)
    if at_once and is_aligned(rows, columns) and (_may_fuse() or _scaled_product("cuda")):
        return (2 * compared + 1) * min(COMPARED, values)  # inputs, the same quantized, outputs of a chunk
    if kernel is int8:
        return BYTES_PER_CHUNKED_VALUE * min(CHUNK, values)
    if kernel is float8:
        copied = together * columns
        return copied + of_a_turn + BYTES_PER_FLOAT8_VALUE * min(CHUNK, copied)
    return BYTES_PER_BLOCKED_VALUE * min(BLOCKED, tokens * columns)


def _quantized_rows(matrix: Sequence[int], tokens: int) -> int:
    """Return of how many ``tokens`` inputs are quantized at once: all if outputs, which stay, are as wide."""
    rows, columns = matrix
    return min(tokens, BLOCK_ROWS * max(1, QUANTIZED // columns // BLOCK_ROWS)) if columns > rows else tokens


def _int8_product(
    x: Tensor, weight: "PackedWeight", max_over_ranks: MaxOverRanks | None
) -> tuple[Callable[[slice], Tensor], int]:
    """Return what multiplies some rows of x, and how many at a time (Int8Rows). Ranks may differ in that:
    all compare once, and the same number of values."""
    is_fused = max_over_ranks is not None and is_aligned(*weight.packed.tensors["values"].shape)
    multiply = _scaled_product(x.device.type) if is_fused else None
    at_once = COMPARED if multiply and not _keeps_sums() else CHUNK
    found = Int8Rows(x, weight.packed, max_over_ranks, _kitchen(), multiply, at_once)
    return found.product, found.step


def _scaled_product(kind: str) -> Callable[..., Tensor] | None:
    """Return what multiplies quantized inputs and scales the sums, or None on devices that have no such."""
    has_kernels = kind == "cuda" and not torch.version.hip and _fuses("int8_linear")
    return scaled_product() if has_kernels else None


def float8(
    x: Tensor, weight: "PackedWeight", bias: Tensor | None, max_over_ranks: MaxOverRanks | None
) -> Tensor:
    """Multiply E4M3 by activations under the file's scale of them, or 1, beyond which they are clamped."""
    from comfy_kitchen.scaled_mm_v2 import scaled_mm_v2  # pyright: ignore[reportMissingImports]  # optional

    tensors = weight.packed.tensors
    given = tensors.get("input_scale")
    one = _one(x.device)
    input_scale = one if given is None else given.float()
    values, scale = tensors["values"], tensors.get("scale", one).float()
    rows = _rows(x)
    inside, after = _bias_where(x, bias)

    def product(chunk: slice) -> Tensor:
        inputs = _as_float8(rows[chunk], input_scale, is_scaled=given is not None)
        return scaled_mm_v2(inputs, values.t(), input_scale, scale, bias=inside, out_dtype=x.dtype)

    return _in_chunks(x, len(values), after, _quantized_rows(values.shape, len(rows)), product)


def _as_float8(rows: Tensor, scale: Tensor, is_scaled: bool) -> Tensor:
    """Quantize activations under one ``scale``; without comfy-kitchen's own kernel some rows at a time, which
    each make a copy on the way, and not multiplied where they are not ``is_scaled``."""
    quantize = partial(_kitchen().quantize_per_tensor_fp8, scale=scale, output_type=torch.float8_e4m3fn)
    if _fuses(FUSED[float8]):
        return quantize(rows)
    out = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    step = max(1, CHUNK // rows.shape[-1])
    for some, quantized in zip(rows.split(step), out.split(step)):
        quantized.copy_(quantize(some) if is_scaled else some.clamp(-MAX_E4M3, MAX_E4M3))
    return out


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)


def _bias_where(x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias that the product adds, and the one to add after it: cuBLAS adds none in float32."""
    return (bias, None) if x.dtype != torch.float32 or x.device.type == "cpu" else (None, bias)


def mxfp8(
    x: Tensor, weight: "PackedWeight", bias: Tensor | None, max_over_ranks: MaxOverRanks | None
) -> Tensor:
    """Multiply blocks of 32 values, of activations and weights; on a CPU, what these blocks stand for."""
    return _multiply_blocks("mxfp8", 32, x, weight, bias)


def nvfp4(
    x: Tensor, weight: "PackedWeight", bias: Tensor | None, max_over_ranks: MaxOverRanks | None
) -> Tensor:
    """Multiply blocks of 16 values under a scale of all; on a CPU, what these blocks stand for."""
    tensors = weight.packed.tensors
    scale = tensors.get("input_scale")
    if scale is None:
        amax = torch.linalg.vector_norm(x, float("inf"))  # the largest, without a copy
        scale = (amax if max_over_ranks is None else max_over_ranks(amax)) / (MAX_E4M3 * MAX_E2M1)
    scale = scale.float().clamp(min=torch.finfo(torch.float32).tiny)  # blocks are divided by it
    return _multiply_blocks("nvfp4", 16, x, weight, bias, scale, tensors["tensor_scale"].float())


def _multiply_blocks(
    kind: str, size: int, x: Tensor, weight: "PackedWeight", bias: Tensor | None, *tensor_scales: Tensor
) -> Tensor:
    """Multiply with comfy-kitchen's functions of that ``kind``, whose blocks have ``size`` values.
    tensor_scales: of all activations, and of all weights, where the format has them."""
    functions = _kitchen()
    quantize = getattr(functions, f"quantize_{kind}")
    tensors = weight.packed.tensors
    own_scale = tensor_scales[:1]
    rows = _rows(x)
    inside, after = _bias_where(x, bias)

    def product(chunk: slice) -> Tensor:
        inputs = rows[chunk]
        quantized, scales = quantize(inputs, *own_scale, **{f"pad_{size}x": len(inputs) % size != 0})
        if x.device.type == "cpu":
            seen = getattr(functions, f"dequantize_{kind}")(quantized, *own_scale, scales, x.dtype)
            return F.linear(seen[: len(inputs)], weight.dequantized(but="smoothing"), bias)
        of_weight = _tiled(tensors["block_scales"], scales.dtype)
        arguments = (quantized, tensors["values"], *tensor_scales, scales, of_weight)
        multiply = getattr(functions, f"scaled_mm_{kind}")
        return multiply(*arguments, bias=inside, out_dtype=x.dtype)[: len(inputs)]

    step = _quantized_rows(weight.shape, len(rows))
    if not _fuses(f"quantize_{kind}"):
        step = max(BLOCK_ROWS, BLOCKED // rows.shape[-1] // BLOCK_ROWS * BLOCK_ROWS)
    return _in_chunks(x, columns=weight.shape[0], bias=after, step=step, product=product)


def _in_chunks(
    x: Tensor, columns: int, bias: Tensor | None, step: int, product: Callable[[slice], Tensor]
) -> Tensor:
    """Return ``product`` of ``step`` rows of x at a time, each of ``columns`` values, with ``bias`` added."""
    rows = x.shape[:-1].numel()
    if rows <= step:
        out = product(slice(0, step))
    else:
        out = x.new_empty(rows, columns)
        for start in range(0, rows, step):
            out[start : start + step] = product(slice(start, start + step))
    if bias is not None:
        out += bias  # in place: it is this function's own, and may be the largest tensor of a block
    return out.view(*x.shape[:-1], columns)


#: What comfy-kitchen's own CUDA kernels do of these.
FUSED: dict[Kernel | None, str] = {
    int8: "int8_linear",
    float8: "quantize_per_tensor_fp8",
    mxfp8: "quantize_mxfp8",
    nvfp4: "quantize_nvfp4",
}


def _rows(x: Tensor) -> Tensor:
    """Return inputs as the kernels read them: (tokens, columns), one after the other."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _tiled(block_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales (rows, blocks) in cuBLAS' tiles. They are stored row by row, which any cut of rows keeps,
    and a padded copy next to them would double what is held."""
    return _kitchen().to_blocked(block_scales.view(torch.uint8), flatten=False).view(dtype)


def _kitchen() -> ModuleType:
    module, why = kitchen()
    assert module is not None, why
    return module
