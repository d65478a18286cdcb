"""Signatures of attention processors, read once: diffusers reads them at every call of an attention layer, in
7 % of the host's time in a step of Flux."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from .replaced_classes import imported, replaced_names

MODELS = ("flux", "flux2", "ideogram4", "kandinsky", "krea2", "ltx", "ltx2")
#: Modules whose layers read them.
READERS = (
    "diffusers.models.attention_processor",
    *(f"diffusers.models.transformers.transformer_{name}" for name in MODELS),
)


class CachedInspect:
    """Takes the place of the module ``inspect``."""

    def __init__(self):
        self._signatures: dict[Callable, inspect.Signature] = {}

    def __getattr__(self, name: str):
        return getattr(inspect, name)

    def signature(self, method: Callable) -> inspect.Signature:
        """Return inspect.signature(method), of a method of any object read once."""
        if torch.compiler.is_compiling():
            return inspect.signature(method)
        function = getattr(method, "__func__", method)
        if function not in self._signatures:
            self._signatures[function] = inspect.signature(method)
        return self._signatures[function]


CACHED_INSPECT = CachedInspect()


def known_signatures() -> AbstractContextManager[None]:
    """Have diffusers' attention layers read signatures that are known."""
    readers = [module for module in imported(READERS) if hasattr(module, "inspect")]
    return replaced_names([(module, "inspect", CACHED_INSPECT) for module in readers])
