"""What stands in a transformer's lists in the place of its blocks."""

import inspect
from typing import Any, Protocol

from torch import nn


class BlockRunner(Protocol):
    """A Stage, as its blocks know it."""

    blocks: range

    def run_block(
        self, index: int, block: nn.Module | None, names: list[str], args: tuple, kwargs: dict
    ) -> Any:
        """Run block ``index`` in its place; return what it returns."""
        ...


def positional_names(block: nn.Module) -> list[str]:
    """List the parameters that a block may be given by position."""
    parameters = inspect.signature(block.forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


class StagedBlock(nn.Module):
    """A block of the transformer, or the place of one that lives on another stage."""

    def __init__(self, stage: BlockRunner, index: int, block: nn.Module):
        super().__init__()
        self.names = positional_names(block)
        self.index = index
        self.block = block if index in stage.blocks else None
        # in lists: neither the stage nor a block without weights is a submodule
        self.stage = [stage]
        self.original = [block]

    def __getattr__(self, name):
        """Return what a model's forward reads of its blocks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.original[0], name)

    def forward(self, *args, **kwargs):
        return self.stage[0].run_block(self.index, self.block, self.names, args, kwargs)
