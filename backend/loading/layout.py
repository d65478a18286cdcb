"""Key layouts of single files: where each parameter of the diffusers transformer is found. A layout is data of the family."""

from dataclasses import dataclass
from typing import Callable, Mapping

Shapes = Mapping[str, tuple[int, ...]]

#: Prefixes under which full checkpoints keep their transformer.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "")


@dataclass(frozen=True)
class Layout:
    """How a single file names a family's tensors.

    signature: keys that tell the family; absent: keys that tell another one.
    names: file's module -> diffusers modules (space separated) stacked in its rows, both with {} for the block number; a name of a whole tensor
    (with .weight or .scale) maps to a whole parameter name. swapped: diffusers modules whose two halves of rows are the other way round.
    config: shapes -> arguments of the diffusers class.
    """

    signature: tuple[str, ...]
    absent: tuple[str, ...]
    names: Mapping[str, str]
    config: Callable[[Shapes], dict]
    swapped: tuple[str, ...] = ()

    def matches(self, shapes: Shapes) -> bool:
        """Is a file with these keys (prefix stripped) of this layout?"""
        return all(key in shapes for key in self.signature) and not any(key in shapes for key in self.absent)


@dataclass(frozen=True)
class Source:
    """Rows lo..hi of the file's tensor ``key`` (hi None: all of it); ``swap``: exchange the halves of the rows."""

    key: str
    lo: int = 0
    hi: int | None = None
    swap: bool = False


def prefix_of(keys, signature: tuple[str, ...]) -> str | None:
    """The prefix under which ``signature`` is found among ``keys``."""
    return next((prefix for prefix in PREFIXES if all(prefix + key in keys for key in signature)), None)


def sources(layout: Layout, parameters: Shapes) -> dict[str, Source]:
    """Parameter name -> Source, for a transformer with these parameter shapes."""
    found = {}
    blocks = 1 + max((int(part) for name in parameters for part in name.split(".") if part.isdigit()), default=0)
    for file_name, targets in layout.names.items():
        for i in range(blocks if "{}" in file_name else 1):
            _add(found, layout, parameters, file_name.replace("{}", str(i)), [t.replace("{}", str(i)) for t in targets.split()])
    return found


def _add(found, layout, parameters, file_name, targets):
    if targets[0] in parameters:                                    # whole tensors, named in full
        found[targets[0]] = Source(file_name)
        return
    for leaf in (".weight", ".bias"):
        row = 0
        for target in (t + leaf for t in targets):
            if target in parameters:
                rows = parameters[target][0]
                whole = len(targets) == 1
                found[target] = Source(file_name + leaf, row, None if whole else row + rows, swap=target.removesuffix(leaf) in layout.swapped)
                row += rows
