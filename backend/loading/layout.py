"""Key layouts of single files: where each parameter of the diffusers transformer is found. A layout is data
of the family."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..parallel.rows import Span
from .guarded import is_number

Shapes = Mapping[str, tuple[int, ...]]

#: Prefixes under which full checkpoints keep their transformer.
PREFIXES = ("model.diffusion_model.", "model.model.", "diffusion_model.", "transformer.", "")


@dataclass(frozen=True)
class Layout:
    """How a single file names a family's tensors.

    signature: keys that tell the family; absent: keys that tell another one; variants: key -> name of a
    variant that is not supported and has it.
    names: file's module -> diffusers modules (space separated) stacked in its rows, both with {} for the
    block number; a name of a whole tensor (with .weight or .scale) maps to a whole parameter name. swapped:
    diffusers modules whose two halves of rows are the other way round, {} being the number of every block,
    {last} that of the last one. reshaped: diffusers parameters that the file stores in another shape of as
    many elements. A parameter that ``names`` does not reach is looked for under its own name. spellings:
    (theirs, ours) replacements, in order, that turn other spellings of the file's keys into this one. config:
    shapes -> arguments of the diffusers class. metadata: strings of the file's header -> more of them.
    """

    signature: tuple[str, ...]
    absent: tuple[str, ...]
    names: Mapping[str, str]
    config: Callable[[Shapes], dict]
    swapped: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    metadata: Callable[[Mapping[str, str]], dict] = lambda strings: {}
    variants: Mapping[str, str] = field(default_factory=dict)

    def keys(self, keys: Collection[str]) -> dict[str, str] | None:
        """This layout's keys, without prefix and in one spelling, -> the file's ``keys``; None where the file
        is of another layout."""
        for prefix in PREFIXES:
            if not self.spellings and any(prefix + key not in keys for key in self.signature):
                continue  # without a look at each key, of which there may be many
            found = {self.spell(key.removeprefix(prefix)): key for key in keys if key.startswith(prefix)}
            if all(key in found for key in self.signature) and not any(
                key in found for key in (*self.absent, *self.variants)
            ):
                return found
        return None

    def unsupported(self, keys: Collection[str]) -> str | None:
        """The name of a variant that is not supported and that ``keys`` are of."""
        if not self.spellings:
            known = ((prefix + key, name) for prefix in PREFIXES for key, name in self.variants.items())
            return next((name for key, name in known if key in keys), None)
        bare = {
            self.spell(key.removeprefix(prefix))
            for prefix in PREFIXES
            for key in keys
            if key.startswith(prefix)
        }
        return next((name for key, name in self.variants.items() if key in bare), None)

    @property
    def most_parts(self) -> int:
        """How many parameters one of the file's tensors holds at most."""
        return max((len(targets.split()) for targets in self.names.values()), default=1)

    def spell(self, key: str) -> str:
        """A key of another spelling in this one."""
        for theirs, ours in self.spellings:
            key = key.replace(theirs, ours)
        return key


@dataclass(frozen=True)
class Source:
    """Rows lo..hi of the file's tensor ``key`` (hi None: all of it); ``swap``: exchange the halves of the
    rows; ``shape``: view it so."""

    key: str
    lo: int = 0
    hi: int | None = None
    swap: bool = False
    shape: tuple[int, ...] | None = None

    def rows(self, spans: Iterable[Span], count: int) -> list[Span]:
        """Where the file keeps the rows ``spans`` of a parameter that has ``count``."""
        if not self.swap:
            return [Span(self.lo + span.lo, self.lo + span.hi) for span in spans]
        half = count // 2
        parts = [(Span(span.lo, min(span.hi, half)), Span(max(span.lo, half), span.hi)) for span in spans]
        return [
            Span(part.lo + shift, part.hi + shift)
            for pair in parts
            for part, shift in zip(pair, (self.lo + half, self.lo - half))
            if part.lo < part.hi
        ]


def sources(layout: Layout, parameters: Shapes) -> dict[str, Source]:
    """Parameter name -> Source, for a transformer with these parameter shapes."""
    found = {}
    blocks = 1 + max(
        (int(part) for name in parameters for part in name.split(".") if part.isdigit()), default=0
    )
    layout = replace(
        layout,
        swapped=tuple(
            _number_last(name, parameters).replace("{}", str(i))
            for name in layout.swapped
            for i in range(blocks)
        ),
    )
    for file_name, targets in layout.names.items():
        for i in range(blocks if "{}" in file_name else 1):
            _add(
                found,
                layout,
                parameters,
                file_name.replace("{}", str(i)),
                [t.replace("{}", str(i)) for t in targets.split()],
            )
    return {name: Source(name) for name in parameters} | found


def numbered(names: Iterable[str]) -> dict[str, list[str]]:
    """Names with {} in the place of a number -> the numbers that are there, as they are written."""
    found = defaultdict(list)
    for name in names:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if is_number(part):
                found[".".join([*parts[:i], "{}", *parts[i + 1 :]])].append(part)
    return found


def from_diffusers(
    layout: Layout, parameters: Shapes, blocks: Mapping[str, list[str]]
) -> dict[str, tuple[int, ...]]:
    """The shapes that a file of ``layout`` would have, of those that a file with diffusers' own names has:
    rows of stacked modules added up. ``blocks``: ``numbered(parameters)``."""
    found, left = {}, dict(parameters)
    for file_name, targets in layout.names.items():
        first = targets.split()[0]
        for leaf in ("", ".weight", ".bias"):
            for i in blocks.get(first + leaf, ()) if "{}" in file_name else ("0",):
                names = [target.replace("{}", i) + leaf for target in targets.split()]
                if all(name in left for name in names):
                    shapes = [left.pop(name) for name in names]
                    found[file_name.replace("{}", i) + leaf] = (
                        (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
                    )
    return left | found


def _number_last(name: str, parameters: Shapes) -> str:
    """``name`` with {last} as the highest block number among ``parameters``."""
    if "{last}" not in name:
        return name
    blocks, rest = name.split("{last}")
    numbers = (int(p.removeprefix(blocks).split(".")[0]) for p in parameters if p.startswith(blocks))
    return f"{blocks}{max(numbers)}{rest}"


def _add(found, layout, parameters, file_name, targets):
    if targets[0] in parameters:  # whole tensors, named in full
        pattern = re.sub(r"\.\d+\.", ".{}.", targets[0])
        found[targets[0]] = Source(
            file_name, shape=parameters[targets[0]] if pattern in layout.reshaped else None
        )
        return
    for leaf in (".weight", ".bias"):
        row = 0
        for target in (t + leaf for t in targets):
            if target in parameters:
                rows = parameters[target][0]
                whole = len(targets) == 1
                found[target] = Source(
                    file_name + leaf,
                    row,
                    None if whole else row + rows,
                    swap=target.removesuffix(leaf) in layout.swapped,
                )
                row += rows


def blocks_of(shapes: Shapes, name: str) -> int:
    """How many blocks a file has under ``name``."""
    return len({key.removeprefix(name + ".").split(".")[0] for key in shapes if key.startswith(name + ".")})
