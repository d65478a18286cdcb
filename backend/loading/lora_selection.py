"""Which adapters of a LoRA file are added: one of each tensor, and none that does not fit, as in ComfyUI."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UnsupportedError
from .adapters import Adapter, MatrixShape
from .parameter_sources import Source


class MisfitError(UnsupportedError):
    """An adapter that is not added; ``short`` says it in a few words. Most of them refuse a file."""

    def __init__(self, short: str, message: str):
        self.short = short
        super().__init__(message)


@dataclass(frozen=True)
class Target:
    """A tensor that a LoRA can name, seen as a matrix of ``shape``. ``pieces``: parameters -> their rows of
    it; ``name`` is for messages. ``head``: rows of a head, where DiffSynth has the rows head by head."""

    name: str
    shape: MatrixShape
    pieces: Mapping[str, Source]
    head: int = 0


def once_each(adapters: list[tuple[Target, Adapter]]) -> tuple[list[tuple[Target, Adapter]], list[Target]]:
    """Split adapters into those to add and the targets of others: of several that change one parameter, that
    of the largest tensor counts. Files of Z-Image have a stacked tensor and, once more, its parts under names
    that ComfyUI does not know (diffusers' converter drops them as redundant)."""
    taken = set()
    chosen = []
    twice = []
    for target, adapter in sorted(adapters, key=lambda each: -len(each[0].pieces)):
        if taken.isdisjoint(target.pieces):
            taken |= target.pieces.keys()
            chosen.append((target, adapter))
        else:
            twice.append(target)
    return chosen, twice


def check_most(fitting: int, misfits: list[MisfitError]):
    """Refuse a file of which half of the adapters or more do not fit. Raises the first of ``misfits``."""
    if misfits and len(misfits) >= fitting:
        raise misfits[0]
