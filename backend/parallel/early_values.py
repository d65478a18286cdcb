"""Values that Ulysses sends before their queries and keys, which are made meanwhile."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..models.blocks import Blocks
from .sequence import Span
from .wire import unpack


@dataclass
class EarlyValues:
    """Values on their way to the ranks of their heads; ``wait`` returns them, (1, B, own heads, all tokens,
    D), as they travel."""

    wait: Callable[[], Tensor]
    dtype: torch.dtype
    whole: Tensor | None = None

    def of_heads(self, part: int, parts: int) -> Tensor:
        """Return those of ``part`` of ``parts`` of this rank's heads."""
        if self.whole is None:
            self.whole = unpack(self.wait(), self.dtype)[0]
        heads = Span(0, self.whole.shape[1]).shard(part, parts)
        return self.whole[:, heads.indices]


#: Value layer -> the query layer that has the same input, which blocks call first.
QUERY_OF = {"to_v": "to_q", "to_value": "to_query", "add_v_proj": "add_q_proj", "to_v_t": "to_q_t"}


class ValueLayer:
    """A value layer of a block, called before its query layer, so that values travel while queries and keys
    are multiplied, too. ``note`` gets what it makes; ``is_early``: whether values travel alone now."""

    def __init__(self, block: nn.Module, name: str, note: Callable[[Tensor], None], is_early: Callable):
        self.block = block
        self.name = name
        self.note = note
        self.is_early = is_early
        self.x: Tensor | None = None
        self.made: Tensor | None = None

    def watch(self, modules: Mapping[str, nn.Module]) -> list[RemovableHandle]:
        """Hook the layer, and its query layer where there is one."""
        layer = modules[self.name]
        handles = [layer.register_forward_pre_hook(self.before), layer.register_forward_hook(self.after)]
        parent, _, leaf = self.name.rpartition(".")
        query = modules.get(f"{parent}.{QUERY_OF.get(leaf, leaf)}")
        if query is not None and query is not layer:
            handles.append(query.register_forward_pre_hook(self.before_query))
        return handles

    def before_query(self, query: nn.Module, args: tuple):
        """Make values first."""
        if torch.compiler.is_compiling():
            return
        self.x = self.made = None  # of a block that has failed
        if not self.is_early():
            return
        layer = self.block.get_submodule(self.name)  # another module since weights are loaded
        if not _speaks(layer):
            self.made, self.x = layer(args[0]), args[0]

    def before(self, layer: nn.Module, args: tuple) -> tuple | None:
        """Leave nothing to do for the block's own call."""
        if torch.compiler.is_compiling() or self.x is None:
            return None
        assert args[0] is self.x, f"{self.name} has another input than its query layer"
        return (args[0][..., :0, :],)

    def after(self, layer: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        """Take what was made, or answer the block's own call with it."""
        if torch.compiler.is_compiling():
            return None
        if self.x is None:
            self.note(output)
            return None
        made, self.made, self.x = self.made, None, None
        return made


def _speaks(layer: nn.Module) -> bool:
    """Does a layer send to other ranks? Then it is called where the block calls it, and once."""
    shard, weight = getattr(layer, "shard", None), getattr(layer, "weight", None)
    is_gathered = shard is not None and (shard.gather or shard.reduce) is not None
    return is_gathered or getattr(weight, "over_tokens", None) is not None


def watch(
    block: nn.Module, blocks: Blocks, note: Callable[[int, int, Tensor], None], is_early: Callable[[], bool]
) -> list[RemovableHandle]:
    """Call ``note`` with what each layer of a group of Blocks.values has made, (B, tokens, features), after
    its place in the group and the number of layers that ``block`` has of it. ``is_early``: whether they are
    to be called before their queries' layers."""
    handles = []
    modules = dict(block.named_modules(remove_duplicate=False))
    for names in blocks.values:
        own = [name for name in names if name in modules]
        for place, name in enumerate(own):
            layer = ValueLayer(block, name, partial(note, place, len(own)), is_early)
            handles += layer.watch(modules)
    return handles
