"""Values that Ulysses sends before their queries and keys, which are normed and rotated meanwhile."""

from collections.abc import Callable
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
        return self.whole[:, heads.lo : heads.hi]


def watch(
    block: nn.Module, blocks: Blocks, note: Callable[[int, int, Tensor], None]
) -> list[RemovableHandle]:
    """Call ``note`` with what each layer of a group of Blocks.values has made, (B, tokens, features), after
    its place in the group and the number of layers that ``block`` has of it."""
    handles = []
    modules = dict(block.named_modules(remove_duplicate=False))
    for names in blocks.values:
        layers = [modules[name] for name in names if name in modules]
        for place, layer in enumerate(layers):
            handles.append(layer.register_forward_hook(partial(_made, note, place, len(layers))))
    return handles


def _made(note: Callable, place: int, count: int, layer: nn.Module, args: tuple, output: Tensor):
    if not torch.compiler.is_compiling():
        note(place, count, output)
