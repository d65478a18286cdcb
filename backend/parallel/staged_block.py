"""What stands in a transformer's lists in the place of its blocks."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def positional_names(block: nn.Module) -> list[str]:
    """Return the names of the forward's arguments that may be given by position."""
    parameters = inspect.signature(block.forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


#: Given the block's index, itself (None: on another stage), names by position, arguments and named ones.
Run = Callable[[int, nn.Module | None, list[str], tuple, dict], Any]


class StagedBlock(nn.Module):
    """A block of the transformer, or the place of one that lives on another stage. run: Stage.run_block."""

    def __init__(self, run: Run, index: int, block: nn.Module, is_here: bool):
        super().__init__()
        self.run = run
        self.names = positional_names(block)
        self.index = index
        self.block = block if is_here else None
        self.original = [block]  # in a list: a block without weights is no submodule

    def __getattr__(self, name):
        """Return what a model's forward reads of its blocks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.original[0], name)

    def forward(self, *args, **kwargs):
        return self.run(self.index, self.block, self.names, args, kwargs)
