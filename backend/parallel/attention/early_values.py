"""Sending attention's values early: Ulysses moves them while the block still computes queries and keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...models.blocks import Blocks
from ..sequence import Span


@dataclass
class EarlyValues:
    """Values on their way to the ranks of their heads.

    wait: returns them alone, (B, own heads, all tokens, D) in a type. dtype: their own. whole: the values
    once they have come, until their last chunk is taken.
    """

    wait: Callable[[torch.dtype], list[Tensor]]
    dtype: torch.dtype
    whole: Tensor | None = None

    def of_heads(self, chunk: int, chunks: int) -> Tensor:
        """Return those of ``chunk`` of ``chunks`` of this rank's heads. Chunks are taken in order, once."""
        if self.whole is None:
            (self.whole,) = self.wait(self.dtype)
        heads = Span(0, self.whole.shape[1]).shard(chunk, chunks)
        values = self.whole[:, heads.indices]
        if chunk + 1 == chunks:  # nobody asks again
            self.whole = None
        return values


#: Value layer -> the query layer that has the same input, which blocks call first.
QUERY_OF = {"to_v": "to_q", "to_value": "to_query", "add_v_proj": "add_q_proj", "to_v_t": "to_q_t"}


class ValueHook(Protocol):
    """What value layers ask and report: attention_hook.Attention, which imports this module."""

    @property
    def sends_values(self) -> bool: ...

    def note_values(self, index: int, count: int, made: Tensor):
        """Note the values ``made`` by the layer ``index`` of a group of ``count``."""
        ...


@dataclass
class ValueLayer:
    """Calls a block's value layer before its query layer, so that values can travel during both products:
    where they travel alone and the layer runs no collective.

    place, count: of this layer among those of its group. attention: returns the hook of the mesh of now.
    x, made: the layer's input and its values, from the early call until the block's own call.
    """

    block: nn.Module
    name: str
    place: int
    count: int
    attention: Callable[[], ValueHook]
    x: Tensor | None = None
    made: Tensor | None = None

    def watch(self, modules: Mapping[str, nn.Module]) -> list[RemovableHandle]:
        """Hook the layer, and the query layer of the same input among ``modules``; return the hooks."""
        layer = modules[self.name]
        handles = [layer.register_forward_pre_hook(self.before), layer.register_forward_hook(self.after)]
        parent, _, leaf = self.name.rpartition(".")
        query = modules.get(f"{parent}.{QUERY_OF.get(leaf, leaf)}")
        if query is not None and query is not layer:
            handles.append(query.register_forward_pre_hook(self.before_query))
        return handles

    def before_query(self, query: nn.Module, args: tuple):
        """Compute the values before the query layer runs, where they travel alone."""
        if torch.compiler.is_compiling():
            return
        self.x = None  # of a block that has failed
        self.made = None
        if not self.attention().sends_values:
            return
        layer = self.block.get_submodule(self.name)  # another module since weights are loaded
        if not _communicates(layer):
            self.made = layer(args[0])
            self.x = args[0]

    def before(self, layer: nn.Module, args: tuple) -> tuple | None:
        """Cut the input of the block's own call to no tokens: the values are there."""
        if torch.compiler.is_compiling() or self.x is None:
            return None
        assert args[0] is self.x, f"{self.name} has another input than its query layer"
        return (args[0][..., :0, :],)

    def after(self, layer: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        """Note values as they are made, early or in the block's own call; return early ones there."""
        if torch.compiler.is_compiling():
            return None
        if self.x is None:
            self.attention().note_values(self.place, self.count, output)
            return None
        made = self.made
        self.made = None
        self.x = None
        return made


def _communicates(layer: nn.Module) -> bool:
    """Return whether a layer sends to other ranks. Such a layer is called only where the block calls it."""
    shard = getattr(layer, "shard", None)
    weight = getattr(layer, "weight", None)
    is_gathered = shard is not None and (shard.gather or shard.reduce) is not None
    return is_gathered or getattr(weight, "max_over_token_ranks", None) is not None


def watch_values(
    block: nn.Module, blocks: Blocks, attention: Callable[[], ValueHook]
) -> list[RemovableHandle]:
    """Hook the value layers of a block (Blocks.values), and return the hooks. ``attention``: returns what is
    given the values (B, tokens, features) of each layer, and says whether they are made early."""
    handles = []
    modules = dict(block.named_modules(remove_duplicate=False))
    for names in blocks.values:
        own = [name for name in names if name in modules]
        for place, name in enumerate(own):
            handles += ValueLayer(block, name, place, len(own), attention).watch(modules)
    return handles
