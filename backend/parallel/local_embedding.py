"""Embedders of the latent on the first stage, which are given the tokens of this rank's forward and no others
(Cache.token_modules)."""

from collections.abc import Callable, Mapping
from math import nan, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..models.patterns import matches
from ..quantization.packed_weight import PackedWeight
from .comm import cat_or_same
from .sequence import Span

#: Tokens of an embedder, and the nested latent that it embeds ("" for all) -> which of them go into this
#: rank's blocks; () for all of them.
Needed = Callable[[int, str], tuple[Span, ...]]


class LocalTokens(Tensor):
    """All that an embedder would return, of which ``local`` alone was computed and is in memory. What treats
    tokens alike does so with these; any other function gets all, NaN but for these.

    local: (B, n, D), the tokens of ``spans``, one after the other. features_first: (B, D, ...), as of a
    convolution, in the place of (B, ..., D).
    """

    local: Tensor
    spans: tuple[Span, ...]
    features_first: bool
    ATTRIBUTES = (
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
        *(Tensor.size, Tensor.dim, Tensor.__len__),
    )

    @classmethod
    def of(
        cls, shape: tuple[int, ...], local: Tensor, spans: tuple[Span, ...], features_first: bool
    ) -> "LocalTokens":
        """Make what has this ``shape``, and the values of ``local`` alone."""
        one = local[0, 0, 0] if local.numel() else local.new_full((), nan)
        tokens = one.expand(shape).as_subclass(cls)
        tokens.local = local
        tokens.spans = spans
        tokens.features_first = features_first
        return tokens

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in cls.ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = func.__name__
        is_own = bool(args) and isinstance(args[0], LocalTokens)
        is_given = is_own or (name in ("add", "cat") and bool(args))
        if name in ALIKE and is_given and "out" not in (kwargs or {}):
            same = ALIKE[name](*args, **(kwargs or {}))
            if same is not None:
                return same
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and is_own:
            raise RuntimeError(f"{name} writes into an embedder's tokens, of which some alone are in memory")
        return func(*map(_whole, args), **{name: _whole(each) for name, each in (kwargs or {}).items()})

    def with_local(self, local: Tensor) -> "LocalTokens":
        """Return the same with other values."""
        return self.of(self.shape, local, self.spans, self.features_first)

    def of_tokens(self, other: Any) -> Any:
        """Return what ``other``, an operand, has for ``local``; None where it makes the result larger."""
        if isinstance(other, LocalTokens):
            return other.local if other.shape == self.shape and _alike(other, self) else None
        if not isinstance(other, Tensor) or other.ndim == 0:
            return other
        if torch.broadcast_shapes(other.shape, self.shape) != self.shape:
            return None
        every = other.expand(self.shape)
        every = every.flatten(2).transpose(1, 2) if self.features_first else every.flatten(1, -2)
        return cut(every, self.spans)

    def whole(self) -> Tensor:
        """Return all tokens, NaN but for those of ``local``: attention spreads what is made of others to a
        result that is refused."""
        batch, _, width = self.local.shape
        tokens = prod(self.shape) // (batch * width)
        shape = (batch, width, tokens) if self.features_first else (batch, tokens, width)
        full = self.local.new_full(shape, nan)
        every = full.transpose(1, 2) if self.features_first else full
        start = 0
        for span in self.spans:
            every[:, span.indices] = self.local[:, start : start + len(span)]
            start += len(span)
        return full.view(self.shape)


def cut(tokens: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """Return the tokens (B, n, D) of ``spans``; a view of one."""
    return cat_or_same([tokens[:, span.indices] for span in spans], dim=1)


def _whole(value: Any) -> Any:
    if isinstance(value, LocalTokens):
        return value.whole()
    return type(value)(map(_whole, value)) if isinstance(value, (list, tuple)) else value


def _flatten(tokens: LocalTokens, start_dim: int = 0, end_dim: int = -1) -> LocalTokens | None:
    last = end_dim % tokens.ndim
    first, features = (2, tokens.ndim - 1) if tokens.features_first else (1, tokens.ndim - 2)
    if (start_dim, last) != (first, features):
        return None
    shape = (*tokens.shape[:start_dim], prod(tokens.shape[start_dim : last + 1]), *tokens.shape[last + 1 :])
    return tokens.of(shape, tokens.local, tokens.spans, tokens.features_first)


def _transpose(tokens: LocalTokens, *dims: int, **named: int) -> LocalTokens | None:
    if tokens.ndim != 3 or sorted([*dims, *named.values()]) != [1, 2]:
        return None
    batch, second, third = tokens.shape
    return tokens.of((batch, third, second), tokens.local, tokens.spans, not tokens.features_first)


def _contiguous(tokens: LocalTokens, **named: Any) -> LocalTokens | None:
    return None if named else tokens.with_local(tokens.local.contiguous())


def _to(tokens: LocalTokens, *args: Any, **kwargs: Any) -> LocalTokens:
    return tokens.with_local(tokens.local.to(*args, **kwargs))


def _add(a: Any, b: Any, **kwargs: Any) -> LocalTokens | None:
    tokens = a if isinstance(a, LocalTokens) else b
    parts = [tokens.of_tokens(each) for each in (a, b)]
    return None if kwargs or any(part is None for part in parts) else tokens.with_local(parts[0] + parts[1])


def _stride(tokens: LocalTokens, *dim: int) -> Any:
    """Return the stride of all tokens as if they were in memory: they are no shape alone."""
    return torch.empty(tokens.shape, device="meta").stride(*dim)


def _slice(tokens: LocalTokens, key: Any) -> Tensor | None:
    """Take consecutive tokens, ``tokens[:, lo:hi]``: a plain tensor where all of them are in memory."""
    if tokens.ndim != 3 or tokens.features_first or not isinstance(key, tuple) or len(key) != 2:
        return None
    samples, which = key
    if samples != slice(None) or not isinstance(which, slice) or which.step not in (None, 1):
        return None
    lo, hi, _ = which.indices(tokens.shape[1])
    part = Span(lo, max(lo, hi))
    within = tuple(span.within(part) for span in tokens.spans)
    start = sum(len(span.within(Span(0, lo))) for span in tokens.spans)
    local = tokens.local[:, start : start + sum(map(len, within))]
    if local.shape[1] == len(part):
        return local
    return tokens.of((tokens.shape[0], len(part), tokens.shape[2]), local, within, False)


def _pad(tokens: LocalTokens, pad: Any, mode: str = "constant", value: Any = None) -> LocalTokens | None:
    """Add features at the ends of tokens."""
    if tokens.ndim != 3 or tokens.features_first or len(pad) != 2 or mode != "constant":
        return None
    local = F.pad(tokens.local, pad, mode, value)
    return tokens.of((*tokens.shape[:2], local.shape[2]), local, tokens.spans, False)


def _cat(tensors: Any, dim: int = 0, **named: Any) -> LocalTokens | None:
    """Join the features of the same tokens, or put tokens one after the other: a second latent's, of which
    some are here too, and those of text or references, all of them."""
    first = next(each for each in tensors if isinstance(each, LocalTokens))
    if named:
        return None
    place = dim % first.ndim
    features = 1 if first.features_first else first.ndim - 1
    shape = list(first.shape)
    shape[place] = sum(each.shape[place] for each in tensors)
    if place == features:
        if not all(isinstance(each, LocalTokens) and _alike(each, first) for each in tensors):
            return None
        return first.of(
            tuple(shape), torch.cat([each.local for each in tensors], 2), first.spans, features == 1
        )
    if first.ndim != 3 or place == 0:
        return None
    pieces = []
    spans: list[Span] = []
    start = 0
    for each in tensors:
        end = start + each.shape[place]
        if not isinstance(each, LocalTokens):
            pieces.append(each.transpose(1, 2) if first.features_first else each)
            spans.append(Span(start, end))
        elif each.features_first == first.features_first:
            pieces.append(each.local)
            spans += [span.moved(start) for span in each.spans]
        else:
            return None
        start = end
    return first.of(tuple(shape), torch.cat(pieces, dim=1), tuple(spans), first.features_first)


def _alike(a: LocalTokens, b: LocalTokens) -> bool:
    return (a.spans, a.features_first) == (b.spans, b.features_first)


#: Functions, and methods, that treat tokens alike -> the same of some of them; None of arguments that do not.
ALIKE: dict[str, Callable[..., Any]] = {
    "flatten": _flatten,
    "transpose": _transpose,
    "contiguous": _contiguous,
    "to": _to,
    "add": _add,
    "cat": _cat,
    "pad": _pad,
    "stride": _stride,
    "__getitem__": _slice,
}


class LocalEmbedder:
    """Gives ``layer``, linear or a convolution whose stride is its kernel, the tokens that are ``needed`` of
    ``latent``."""

    def __init__(self, layer: nn.Module, needed: Needed, latent: str = ""):
        self.needed = needed
        self.latent = latent
        self.is_convolution = isinstance(layer, (nn.Conv2d, nn.Conv3d))
        self.spans: tuple[Span, ...] = ()
        self.shape: tuple[int, ...] = ()
        self.start = 0
        # the family's own hooks after it see all tokens, or what stands for them
        self.handles: list[RemovableHandle] = [
            layer.register_forward_pre_hook(self.give),
            layer.register_forward_hook(self.take, prepend=True),
        ]

    def give(self, layer: Any, args: tuple) -> tuple | None:
        """Return the arguments of the layer for the tokens that are needed; None where all are."""
        self.spans = ()
        if len(args) != 1 or _has_one_scale(layer):
            return None
        return self._give_lines(layer, *args) if self.is_convolution else self._give_tokens(*args)

    def _give_tokens(self, x: Tensor) -> tuple | None:
        self.spans = self.needed(prod(x.shape[1:-1]), self.latent)
        if not self.spans:
            return None
        self.shape = x.shape[:-1]
        return (cut(x.flatten(1, -2), self.spans),)

    def _give_lines(self, layer: Any, x: Tensor) -> tuple | None:
        """Cut whole lines of tokens, with those that are needed: (B, C, [T,] H, W)."""
        *frames, height, width = layer.kernel_size
        counts = [side // step for side, step in zip(x.shape[2:], layer.kernel_size)]
        if any(side % step for side, step in zip(x.shape[2:], layer.kernel_size)) or frames not in ([], [1]):
            return None
        self.spans = self.needed(prod(counts), self.latent)
        if not self.spans:
            return None
        self.shape = (x.shape[0], layer.out_channels, *counts)
        (span,) = self.spans
        line = counts[-1]
        first, last = span.lo // line, -(-span.hi // line)
        self.start = span.lo - first * line
        lines = x.flatten(2, -2)[:, :, first * height : last * height]
        return (lines.unsqueeze(2) if frames else lines,)

    def take(self, layer: nn.Module, args: tuple, output: Tensor) -> LocalTokens | None:
        """Return what stands for the layer's output of all tokens."""
        if not self.spans:
            return None
        if not self.is_convolution:
            return LocalTokens.of((*self.shape, output.shape[-1]), output, self.spans, False)
        (span,) = self.spans
        tokens = output.flatten(2).transpose(1, 2)[:, self.start : self.start + len(span)]
        # now, or residuals would keep a convolution's order, and each norm of a block would copy them
        return LocalTokens.of(self.shape, tokens.contiguous(), self.spans, True)


def _has_one_scale(layer: Any) -> bool:
    """Return whether inputs are quantized under one scale of all tokens."""
    weight = layer.weight
    return isinstance(weight, PackedWeight) and weight.has_one_scale


def embed_local_tokens(
    transformer: nn.Module, patterns: tuple[str, ...], needed: Needed, latents: Mapping[str, str] = {}
) -> list[RemovableHandle]:
    """Have the layers of ``patterns`` embed the tokens that are ``needed``; return the hooks. ``latents``:
    layer -> the nested latent that it embeds."""
    handles: list[RemovableHandle] = []
    for name, layer in transformer.named_modules():
        if matches(name, patterns):
            handles += LocalEmbedder(layer, needed, latents.get(name, "")).handles
    return handles
