"""Inputs of int8 products, quantized under a scale of each row as comfy-kitchen's eager functions do, bit by
bit. By its CUDA kernel scales are the same, and values next to a half may be rounded the other way."""

import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from .formats import rotated, rotation
from .packed import Packed

#: The largest value of the format.
MAX_INT8 = 127
#: To multiples of so many rows comfy-kitchen pads the inputs of a product of integers, in a copy.
PADDED_ROWS = 32
#: comfy-kitchen's product of int8 inputs by int8 weights that scales the sums before it writes them, which it
#: has for four-bit weights. It is not public: of a version where it takes other arguments it is not used.
SCALED_PRODUCT = "_int4_linear_via_int8_values"
ARGUMENTS = ["x_int8", "weight_int8", "x_scale", "weight_scale", "bias", "out_dtype"]
#: Of weights whose rows and columns are multiples of these it multiplies on every GPU.
SCALED_ROWS, SCALED_COLUMNS = 8, 16


class Int8Rows:
    """Inputs x, (..., columns), of an int8 product, whose rows are multiplied some at a time.

    max_over_ranks: where columns are cut over ranks, compares the largest values of all rows, here and once.
    kitchen: comfy-kitchen. multiply: its SCALED_PRODUCT, or None for a product of integers, which small
    kernels quantize for and scale. at_once: values of inputs or outputs of the rows that are multiplied at a
    time, which are ``step``; where that is all of them, they are rotated once.
    """

    def __init__(
        self,
        x: Tensor,
        packed: Packed,
        max_over_ranks: Callable[[Tensor], Tensor] | None,
        kitchen: ModuleType,
        multiply: Callable[..., Tensor] | None,
        at_once: int,
    ):
        self.values = packed.tensors["values"].contiguous()
        self.scale = packed.tensors["scale"].float().view(1, -1)
        self.size = rotation(packed.settings)
        self.rows = x.reshape(-1, x.shape[-1])
        self.kitchen = kitchen
        self.multiply = multiply
        self.step = rows_at_once(at_once, self.values)
        self._turned: Tensor | None = None
        if multiply is not None and self.size is not None and len(self.rows) <= self.step:
            self._turned = rotated(self.rows, self.size)
        self._amax = None
        if max_over_ranks is not None:
            starts = range(0, len(self.rows), self.step)
            found = [row_amax(self._rotated(slice(start, start + self.step))) for start in starts]
            self._amax = max_over_ranks(torch.cat(found))

    def _rotated(self, some: slice) -> Tensor:
        return rotated(self.rows[some], self.size) if self._turned is None else self._turned[some]

    def product(self, some: slice) -> Tensor:
        """Multiply some rows, at most ``step``, each once: their memory is overwritten where it is not that
        of x."""
        turned = self._rotated(some)
        if self.multiply is not None and self._amax is not None:
            if self.size is None:
                turned = turned.clone(memory_format=torch.contiguous_format)
            inputs, scales = under_scales(turned, self._amax[some], self.kitchen.quantize_int8_rowwise)
            of_weight = self.scale.view(-1).expand(len(self.values))
            return self.multiply(inputs, self.values, scales, of_weight, None, turned.dtype)
        scales = scales_of(row_amax(turned) if self._amax is None else self._amax[some])
        inputs = as_int8(turned, scales)
        dtype = turned.dtype
        del turned
        sums = self.kitchen.mm_int8(inputs, self.values.t()).float()  # its integers are freed here
        return sums.mul_(scales * self.scale).to(dtype)


def rows_at_once(values: int, weight: Tensor) -> int:
    """Return how many rows have so many ``values`` as inputs or outputs of a product with ``weight``."""
    return max(PADDED_ROWS, values // max(weight.shape) // PADDED_ROWS * PADDED_ROWS)


def row_amax(rows: Tensor) -> Tensor:
    """Return the largest absolute value of each row, (rows, 1), without a copy of all of them."""
    return torch.linalg.vector_norm(rows, float("inf"), dim=-1, keepdim=True)


def scales_of(amax: Tensor) -> Tensor:
    """Return the float32 scales of rows with these largest values."""
    return (amax.float() / MAX_INT8).clamp(min=1e-30)


def as_int8(rows: Tensor, scales: Tensor) -> Tensor:
    """Quantize rows under their ``scales``, (rows, 1)."""
    divisors = scales.to(rows.dtype)  # float16 has smaller ones than its tiny, subnormal as they are
    divisors.masked_fill_(divisors == 0, torch.finfo(rows.dtype).tiny)
    return (rows / divisors).round_().clamp_(-MAX_INT8 - 1, MAX_INT8).to(torch.int8)


def under_scales(
    rows: Tensor, amax: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return rows, which are overwritten, quantized under scales of larger values than their own, and these
    scales. ``quantize`` is comfy-kitchen's, which reads rows once and scales each by its largest value: that
    takes the place of a row's first value, which is quantized apart. Its scales are not used: the CUDA kernel
    leaves NaN out of the largest, and is off by a bit."""
    first = rows[:, :1].clone()
    rows[:, :1] = amax
    values, _ = quantize(rows)
    scales = scales_of(amax)
    values[:, :1] = as_int8(first, scales)
    return values, scales


def is_aligned(rows: int, columns: int) -> bool:
    """Return whether SCALED_PRODUCT takes a weight of rows x columns: it pads on Turing alone, and elsewhere
    CUTLASS and cuBLAS refuse others, which uneven cuts have."""
    return rows % SCALED_ROWS == 0 and columns % SCALED_COLUMNS == 0


@cache
def scaled_product() -> Callable[..., Tensor] | None:
    """Return comfy-kitchen's SCALED_PRODUCT on NVIDIA's GPUs; None where there is none."""
    import comfy_kitchen  # pyright: ignore[reportMissingImports]  # optional
    from comfy_kitchen.backends import cuda  # pyright: ignore[reportMissingImports]  # optional

    found = getattr(cuda, SCALED_PRODUCT, None)
    has_quantizer = hasattr(comfy_kitchen, "quantize_int8_rowwise")  # which under_scales is given
    is_ours = found is not None and list(inspect.signature(found).parameters) == ARGUMENTS
    return found if is_ours and has_quantizer else None
