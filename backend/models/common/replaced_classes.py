"""Modules of diffusers' that get a forward of ours, with the weights that they have; and what its files call
during a request."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn


def replace_classes(transformer: nn.Module, ours: Mapping[type[nn.Module], type[nn.Module]]):
    """Make every module that is of a class of diffusers' itself one of ``ours``, a subclass of it."""
    for module in transformer.modules():
        if type(module) in ours:
            module.__class__ = ours[type(module)]


def imported(names: Iterable[str]) -> list[ModuleType]:
    """Return those of the Python modules ``names`` that are imported."""
    return [sys.modules[name] for name in names if name in sys.modules]


@contextmanager
def replaced_names(ours: Sequence[tuple[ModuleType, str, Any]]) -> Iterator[None]:
    """Have names of Python modules stand for others: (module, name, ours)."""
    before = [(module, name, getattr(module, name)) for module, name, _ in ours]
    for module, name, value in ours:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
