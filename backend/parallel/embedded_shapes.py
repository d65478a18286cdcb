"""Embedders of the latent on later stages, which are sent tokens and need a shape alone (Stage._receive)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .modulation.modulation_cache import COMPUTED, CachedLayer


class ShapeOnly(Tensor):
    """Zeros of which one is in memory, which what diffusers does keeps so: ``contiguous`` would write all."""

    VIEWS = (Tensor.flatten, Tensor.transpose)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(cls) if func in cls.VIEWS else out

    @classmethod
    def of(cls, tensor: Tensor) -> "ShapeOnly":
        """Make a tensor of the shape of ``tensor`` that holds one number."""
        return tensor.new_zeros(1).expand(tensor.shape).as_subclass(cls)


class ShapeLayer(CachedLayer):
    """Stands in the place of an embedder of the latent and calls it once, for the shape: in a request once
    for each prompt (hooks may add tokens of its references) and each shape of its inputs.

    known: (prompt, shapes of the inputs) -> ShapeOnly.
    """

    def __getattr__(self, name: str) -> Any:
        """Return what a model's forward reads of its embedder."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, *args, **kwargs) -> Any:
        context = self.current.context
        if context is None:
            return self.layer(*args, **kwargs)
        inputs = (*args, *kwargs.values())
        key = (context.prompt, *(each.shape for each in inputs if isinstance(each, Tensor)))
        if key not in self.known:
            COMPUTED[self.kind] += 1
            self.known[key] = ShapeOnly.of(self.layer(*args, **kwargs))
        return self.known[key]

    @property
    def bytes(self) -> int:
        return sum(output.untyped_storage().nbytes() for output in self.known.values())
