"""The weight of a linear layer that stays as its file stores it, and the layers that hold one."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import reason
from ..hardware.device_memory import is_out_of_memory
from ..runtime.opaque_ops import opaque
from .added_products import AddedProduct, LowRank, Scales, at_strengths, concatenated, divide, scaled
from .formats import ONE_BYTE, SCALED_AFTER, Effort, effort_of
from .kernels import Kernel, MatmulChoice, MaxOverRanks, float8, int8, int8_multiplier, mxfp8, nvfp4
from .packed import Packed

#: (device, dtype) -> the memory in which weights are dequantized, one after the other.
_SCRATCH: dict[tuple[torch.device, torch.dtype], Tensor] = {}
#: Types of one byte that not every collective knows.
FLOAT8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class PackedWeight(nn.Module):
    """A quantized matrix as a linear layer's ``weight``; what its file stores are its parameters.

    dtype: of the products. choice: how it multiplies. shape: of the weight. adapters: LoRAs that are added to
    the products, by key. scales: float32 factors of the stored weight's rows and columns (DoRA), not those of
    its format. whole: the weight in ``dtype`` with adapters of other kinds in it, next to the stored one.
    buffer: memory of its own in which the weight stays dequantized (dequantize_once.py). divided: which of
    the layer's tokens ranks divide (LayerTokens.divided); max_over_token_ranks: compares largest values over
    these ranks (parallel/modulation/token_scales.py).
    """

    def __init__(
        self, packed: Packed, dtype: torch.dtype, choice: MatmulChoice | None = None, divided: str = ""
    ):
        super().__init__()
        self.dtype = dtype
        self.choice = choice or MatmulChoice(None, "as chosen")
        self.divided = divided
        # whether all inputs are quantized under the largest of their values: the same on all ranks
        self.has_one_scale = self.choice.kernel is nvfp4 and "input_scale" not in packed.tensors
        self.max_over_token_ranks: MaxOverRanks | None = None
        self.shape = torch.Size(packed.shape)
        self._scale = _one_scale(packed) if dtype in SCALED_AFTER else None
        self.adapters: dict[Hashable, AddedProduct] = {}
        self.scales = Scales()
        self._joined: LowRank | None = None
        self.whole: Tensor | None = None
        self.buffer: Tensor | None = None
        #: What the weight in ``buffer`` is without; None: it is not there yet.
        self._buffered: str | None = None
        self._empty = replace(packed, tensors={})
        self._dtypes = {role: tensor.dtype for role, tensor in packed.tensors.items()}
        for role, tensor in packed.tensors.items():
            # float8 as bytes: not every collective knows it
            bits = tensor.view(torch.uint8) if tensor.dtype in FLOAT8_TYPES else tensor
            self.register_parameter(role, nn.Parameter(bits, requires_grad=False))

    @property
    def factor(self) -> float | None:
        """The scale of all values of a float8 or int8 weight; None where there are several, or none."""
        if isinstance(self._scale, Tensor):
            self._scale = self._scale.item()
        return self._scale

    @property
    def packed(self) -> Packed:
        """What is stored, as it is now: gathered or not, and wherever it was moved."""
        tensors = {role: self.get_parameter(role).view(dtype) for role, dtype in self._dtypes.items()}
        return replace(self._empty, tensors=tensors)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def set_adapters(
        self,
        adapters: Mapping[Hashable, AddedProduct],
        whole: Tensor | None = None,
        scales: Scales | None = None,
    ):
        """Have these adapters added to the products, or multiply by ``whole`` instead."""
        parts = _low_rank(adapters)
        if self._joined is not None and len(parts) > 1 and [*parts] == [*_low_rank(self.adapters)]:
            self._joined = at_strengths(self._joined, list(parts.values()))
        else:
            self._joined = concatenated(list(parts.values()))
        self.adapters, self.whole, self.scales = dict(adapters), whole, scales or Scales()

    @property
    def added_tensors(self) -> list[Tensor]:
        """What is next to the stored weight: of its adapters, or the weight as a whole."""
        of_adapters = [tensor for each in self.adapters.values() for tensor in each.tensors]
        return of_adapters + self.scales.tensors + ([] if self.whole is None else [self.whole])

    @property
    def format_name(self) -> str:
        return self._empty.format.short

    @property
    def effort(self) -> Effort:
        return effort_of(self._empty.format, self._empty.settings, self.dtype)

    def stay(self, buffer: Tensor | None):
        """Have the weight stay in ``buffer`` from its next product on; None: be dequantized for each."""
        self.buffer, self._buffered = buffer, None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Give a function that takes ``weight`` itself, as multi-head attention's, what it stands for."""

        def plain(x):
            return x.effective() if isinstance(x, PackedWeight) else x

        return func(*map(plain, args), **{name: plain(x) for name, x in (kwargs or {}).items()})

    def effective(self) -> Tensor:
        """Return the weight with the adapters in it, in memory of its own."""
        weight = self.packed.dequantize(self.dtype) if self.whole is None else self.whole
        weight = scaled(weight, *self.scales)
        for adapter in self.adapters.values():
            weight = weight + adapter.difference()
        return weight.to(self.dtype)

    def _apply(self, fn, recurse=True):
        """Move what is next to the stored weight with it."""
        if (together := self._joined) is not None:
            together.move(fn)
            if together.strengths is not None:
                divide(together, list(_low_rank(self.adapters).values()))
        for each in self.adapters.values():
            if not isinstance(each, LowRank):
                each.move(fn)
        self.scales = self.scales.map(fn)
        self.whole = None if self.whole is None else fn(self.whole)
        return super()._apply(fn, recurse)

    def linear(self, x: Tensor, bias: Tensor | None, max_over_ranks: MaxOverRanks | None = None) -> Tensor:
        """Return x W^T + bias, (..., rows). ``max_over_ranks``: where columns are cut over ranks."""
        within = bias if self.scales.rows is None else None
        inputs = scaled(x, None, self.scales.columns)
        if self.whole is not None:
            out = F.linear(inputs, self.whole, within)
        elif self.choice.kernel is not None and x.numel():
            out = self._native(self.choice.kernel, inputs, within, max_over_ranks)
        else:
            if self.max_over_token_ranks is not None:  # the other ranks wait for this one
                self.max_over_token_ranks(x.new_zeros(()))
            out = self._by_dequantized(inputs, within)
        self._adapt(out, x)
        if bias is not None and within is None:
            out += bias
        return out

    def _adapt(self, out: Tensor, x: Tensor):
        """Turn the product of ``x`` with the stored weight into that with the adapters, in place."""
        if self.scales.rows is not None:
            out *= self.scales.rows
        if self._joined is not None:
            self._joined.add_to(out, x)
        for each in self.adapters.values():
            if not isinstance(each, LowRank):
                each.add_to(out, x)

    def multiplier(
        self, x: Tensor, max_over_ranks: MaxOverRanks | None = None
    ) -> Callable[[slice, Tensor], None]:
        """Return a function that writes some rows of x W^T into given memory (see ``multiplier``)."""
        plain, factor = self.whole, 1.0
        if plain is None and self.choice.kernel is None:
            plain, factor = self._unscaled()
        native = None
        if plain is None and self.choice.kernel is int8:
            native = int8_multiplier(
                self._smoothed(scaled(x, None, self.scales.columns)), self, max_over_ranks
            )

        def multiply(rows: slice, out: Tensor):
            if plain is not None:
                inputs = scaled(x[rows], None, self.scales.columns)
                torch.addmm(out, inputs, plain.t(), beta=0, alpha=factor, out=out)
            elif native is None:
                out.copy_(self.linear(x[rows], None))
                return
            else:
                native(rows, out)
            self._adapt(out, x[rows])

        return multiply

    def _by_dequantized(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the weight-only product; where there are no tokens nothing is dequantized."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.shape[0])
        weight, factor = self._unscaled()
        if factor == 1.0:
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        beta, added = (0, x.new_empty(1)) if bias is None else (1, bias)
        out = torch.addmm(added, rows, weight.t(), beta=beta, alpha=factor)
        return out.view(*x.shape[:-1], len(weight))

    def _unscaled(self) -> tuple[Tensor, float]:
        """Return the weight, and what products with it are multiplied by. Bytes under one scale are read
        once; scaling them would move them twice more, or take four times as long (int8, cast one by one)."""
        factor = self.factor
        if factor is None:
            return self.dequantized(), 1.0
        return self.dequantized(but="scale"), factor

    def _over_ranks(self, over_columns: MaxOverRanks | None) -> MaxOverRanks | None:
        """Compare over the ranks that hold other columns, then over those that have other tokens."""
        over_tokens = self.max_over_token_ranks
        if over_tokens is None or over_columns is None:
            return over_tokens or over_columns
        return lambda amax: over_tokens(over_columns(amax))

    def _native(
        self, kernel: Kernel, x: Tensor, bias: Tensor | None, max_over_ranks: MaxOverRanks | None
    ) -> Tensor:
        """Return the native product. Where it fails for a shape that no trial (native_trial.py) has seen, and
        no other rank waits in it, the layer is weight only from now on."""
        max_over_ranks = self._over_ranks(max_over_ranks)
        try:
            return kernel(self._smoothed(x), self, bias, max_over_ranks)
        except Exception as error:  # comfy-kitchen's CUDA functions assert, too
            if max_over_ranks is not None or is_out_of_memory(error):
                raise
            why = f"its product failed ({reason(error, 160)})"
        warnings.warn(f"a layer in {self.format_name} multiplies weight only: {why}", stacklevel=2)
        self.choice = MatmulChoice(None, why)
        return self._by_dequantized(x, bias)

    def _smoothed(self, x: Tensor) -> Tensor:
        if "smoothing" not in self._dtypes:
            return x
        return x * self.get_parameter("smoothing").to(x.dtype)

    def dequantized(self, but: str = "") -> Tensor:
        """Return the weight without what is stored as ``but``, until another is dequantized, or in buffer."""
        if self.buffer is not None and self._buffered == but:
            return self.buffer
        packed = self.packed
        packed = replace(packed, tensors={role: x for role, x in packed.tensors.items() if role != but})
        out = packed.dequantize(self.dtype, self._scratch() if self.buffer is None else self.buffer)
        self._buffered = but
        return out

    def _scratch(self) -> Tensor:
        """Return the memory that all weights share, of this one's shape."""
        place = (self.device, self.dtype)
        scratch = _SCRATCH.get(place)
        if scratch is None or scratch.numel() < self.shape.numel():
            scratch = _SCRATCH[place] = torch.empty(self.shape.numel(), device=place[0], dtype=place[1])
        return scratch[: self.shape.numel()].view(self.shape)


def _low_rank(adapters: Mapping[Hashable, AddedProduct]) -> dict[Hashable, LowRank]:
    return {key: each for key, each in adapters.items() if isinstance(each, LowRank)}


def quantized(modules: Iterable[nn.Module]) -> list[PackedWeight]:
    """Return the packed weights in ``modules``."""
    every = chain.from_iterable(module.modules() for module in modules)
    return [each for each in every if isinstance(each, PackedWeight)]


def read_factors(module: nn.Module):
    """Read all weights' factors in one copy: one by one, each would wait for what travels to the GPU."""
    unread = {each: each._scale for each in quantized([module]) if isinstance(each._scale, Tensor)}
    if unread:
        factors = torch.stack([scale.double().reshape(()) for scale in unread.values()]).tolist()
        for weight, factor in zip(unread, factors):
            weight._scale = factor


def _one_scale(packed: Packed) -> Tensor | float | None:
    """Return the scale of all values of a float8 or int8 weight, as it is on the GPU; None where there are
    several, or none to read."""
    scale = packed.tensors.get("scale")
    if scale is None or scale.numel() != 1 or scale.is_meta or packed.format.short not in ONE_BYTE:
        return None
    return scale if scale.device.type == "cuda" else scale.item()


class QuantLinear(nn.Module):
    """A linear layer with a quantized weight; parameter names begin as those of nn.Linear."""

    def __init__(self, linear: nn.Linear, weight: PackedWeight):
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = weight
        self.bias = linear.bias
        carry_hooks(linear, self)

    def opaque_width(self) -> int:
        """Return the features of the layer's output on this rank."""
        return self.out_features

    @opaque
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.linear(x, self.bias)


def carry_hooks(old: nn.Module, new: nn.Module):
    """Have ``new``, which takes the place of ``old``, call its forward hooks."""
    new.__dict__ |= {name: hooks for name, hooks in vars(old).items() if name.startswith("_forward_")}


def linear(
    x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, max_over_ranks: MaxOverRanks | None = None
) -> Tensor:
    """Return x W^T + bias of a plain or a quantized weight; ``max_over_ranks`` as in PackedWeight."""
    if isinstance(weight, PackedWeight):
        return weight.linear(x, bias, max_over_ranks)
    return F.linear(x, weight, bias)


def can_multiply_in_chunks(weight: Tensor | PackedWeight) -> bool:
    """Return whether some inputs are multiplied as they are next to others, so that ranks may multiply them
    chunk by chunk: no scale is of all of them. The same on all ranks."""
    return not isinstance(weight, PackedWeight) or weight.choice.kernel in (None, float8, mxfp8, int8)


def multiplier(
    weight: Tensor | PackedWeight, x: Tensor, max_over_ranks: MaxOverRanks | None = None
) -> Callable[[slice, Tensor], object]:
    """Return what writes rows of x W^T, of x (tokens, columns), to memory that is given, each once. The
    weight is dequantized once, until another one is; ranks compare the largest values of all of x at once."""
    if isinstance(weight, PackedWeight):
        return weight.multiplier(x, max_over_ranks)
    return lambda rows, out: torch.mm(x[rows], weight.t(), out=out)


def scratch_bytes(device: torch.device) -> int:
    """Return the memory on ``device`` in which weights are dequantized."""
    return sum(each.numel() * each.element_size() for (place, _), each in _SCRATCH.items() if place == device)


def free_scratch():
    """Free the memory of all devices in which weights are dequantized."""
    _SCRATCH.clear()
