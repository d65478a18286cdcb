"""Values that Ulysses sends before their queries and keys, which are normed and rotated meanwhile."""

from collections.abc import Callable, Iterable
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
    """Values on their way to the ranks of their heads; ``take`` waits for them, (1, B, own heads, all tokens,
    D)."""

    take: Callable[[], Tensor]
    dtype: torch.dtype
    whole: Tensor | None = None

    def of_heads(self, part: int, parts: int) -> Tensor:
        """Return those of ``part`` of ``parts`` of this rank's heads."""
        if self.whole is None:
            self.whole = unpack(self.take(), self.dtype)[0]
        heads = Span(0, self.whole.shape[1]).shard(part, parts)
        return self.whole[:, heads.lo : heads.hi]


def watch(
    block: nn.Module, blocks: Blocks, take: Callable[[Iterable[Tensor]], None]
) -> list[RemovableHandle]:
    """Call ``take`` with what the layers of a group of Blocks.values have made, (B, tokens, features) each,
    once all have that ``block`` has. In compiled blocks norms and rotations are a kernel or two, behind which
    nothing hides: there it is not called."""
    handles = []
    for names in blocks.values:
        layers = [layer for name in names if (layer := _layer(block, name)) is not None]
        made: dict[int, Tensor] = {}
        note = partial(_note, made, len(layers), take)
        handles += [layer.register_forward_hook(partial(note, place)) for place, layer in enumerate(layers)]
    return handles


def _layer(block: nn.Module, name: str) -> nn.Module | None:
    """Return the layer ``name`` of a block; None where it has none, as blocks of one stream or the last."""
    try:
        return block.get_submodule(name)
    except AttributeError:
        return None


def _note(made: dict, count: int, take: Callable, place: int, layer: nn.Module, args: tuple, output: Tensor):
    if torch.compiler.is_compiling():
        return
    made[place] = output
    if len(made) == count:
        values = [made[each] for each in range(count)]
        made.clear()  # the graph of this step may free them
        take(values)
