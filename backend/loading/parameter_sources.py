"""Where a single file keeps each parameter of the diffusers transformer, by the key layout of its family."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..models.key_layout import Layout, Shapes
from ..parallel.sequence import Span
from .header_limits import is_number


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
    found = {}
    left = dict(parameters)
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
