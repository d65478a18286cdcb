"""Where a file keeps each parameter of the diffusers transformer, by its family's key layout, and reading it
from there, whole or the piece that a rank keeps."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UnsupportedError, quoted
from ..models.key_layout import Layout, Shapes
from ..parallel.comm import cat_or_same
from ..parallel.matrix_cuts import Shard
from ..parallel.sequence import Span
from ..quantization.packed import Packed, join
from .header_limits import is_number
from .safetensors_files import StoredSize, Weights


@dataclass(frozen=True)
class Source:
    """Rows lo..hi of the file's tensor ``key`` (hi None: all); ``swap``: exchange the halves of the rows;
    ``shape``: view it so."""

    key: str
    lo: int = 0
    hi: int | None = None
    swap: bool = False
    shape: tuple[int, ...] | None = None

    def rows(self, spans: Iterable[Span], count: int) -> list[Span]:
        """Return where the file keeps the rows ``spans`` of a parameter that has ``count``."""
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
    """Return parameter name -> Source, for a transformer with these parameter shapes."""
    by_name = {name: Source(name) for name in parameters}
    numbers = (int(part) for name in parameters for part in name.split(".") if part.isdigit())
    blocks = range(1 + max(numbers, default=0))
    last = [_number_last(name, parameters) for name in layout.swapped]
    swapped = tuple(name.replace("{}", str(i)) for name in last for i in blocks)
    layout = replace(layout, swapped=swapped)
    for file_name, targets in layout.names.items():
        for i in map(str, blocks if "{}" in file_name else [0]):
            modules = targets.replace("{}", i).split()
            _add(by_name, layout, parameters, file_name.replace("{}", i), modules)
    return by_name


def check_shape(
    file: str, family: str, name: str, source: Source, have: tuple[int, ...], want: tuple[int, ...]
):
    """Refuse a tensor of shape ``have`` where the parameter ``name`` needs ``want``. Raises
    UnsupportedError."""
    if source.shape is not None and math.prod(have) == math.prod(want):
        return
    rows = have[0] if source.hi is None else min(source.hi, have[0]) - source.lo
    if (rows, *have[1:]) != want:
        raise UnsupportedError(
            f"{file}: {quoted(name)} has shape {(rows, *have[1:])} in the file but {family} with this "
            f"configuration needs {want}; the file is of another variant."
        )


def read_whole(files: Weights, key: str, source: Source, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Read the rows of the tensor ``key`` that ``source`` names, in the parameter's order and shape."""
    rows = slice(source.lo, source.hi) if source.hi is not None else slice(None)
    tensor = files.read(key, rows, dtype=dtype, device=device)
    if source.swap:
        tensor = torch.cat(tensor.chunk(2)[::-1])
    return tensor if source.shape is None else tensor.reshape(source.shape)


def read_shard(
    files: Weights,
    key: str,
    source: Source,
    shard: Shard,
    height: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Read the rows and columns that ``shard`` keeps of a parameter of ``height`` rows, and nothing else."""
    rows = [span.indices for span in source.rows(shard.outputs, height)]
    columns = [slice(None)]
    if len(files.shapes[key]) > 1:
        columns = [span.indices for span in shard.inputs]
    # one piece alone stays where it is mapped
    return cat_or_same(
        [cat_or_same([files.read(key, r, c, dtype, device) for c in columns], -1) for r in rows], 0
    )


def read_packed(
    files: Weights, key: str, source: Source, shard: Shard | None, height: int, device: torch.device
) -> Packed | None:
    """Read what ``read_whole`` or ``read_shard`` would as it is stored; None where it is no quantized
    matrix."""
    if source.shape is not None:
        return None
    own = shard or _whole(files, key, height)
    below = []
    for span in source.rows(own.outputs, height):
        row_pieces = [files.packed(key, span.indices, columns.indices, device) for columns in own.inputs]
        pieces = [piece for piece in row_pieces if piece is not None]
        if not pieces:
            return None
        below.append(join(pieces, 1))
    return join(below, 0)


def packed_sizes(
    files: Weights, key: str, source: Source, shard: Shard | None, height: int
) -> list[StoredSize] | None:
    """Measure what ``read_packed`` would read; None where it is no quantized matrix."""
    if source.shape is not None:
        return None
    own = shard or _whole(files, key, height)
    columns = [range(span.lo, span.hi) for span in own.inputs]
    return files.stored_sizes(key, sum(map(len, own.outputs)), columns)


def _whole(files: Weights, key: str, height: int) -> Shard:
    """Return the shard that is all of the matrix ``key``, of a parameter of ``height`` rows."""
    return Shard((Span(0, height),), (Span(0, files.shapes[key][-1]),))


def numbered(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names with {} in the place of a number -> the numbers that are there, as written."""
    numbers = defaultdict(list)
    for name in names:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if is_number(part):
                numbers[".".join([*parts[:i], "{}", *parts[i + 1 :]])].append(part)
    return numbers


def from_diffusers(
    layout: Layout, parameters: Shapes, blocks: Mapping[str, list[str]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file of ``layout``, from those of a file with diffusers' own names: rows of
    stacked modules are added up. ``blocks``: ``numbered(parameters)``."""
    renamed = {}
    left = dict(parameters)
    for file_name, targets in layout.names.items():
        first = targets.split()[0]
        for leaf in ("", ".weight", ".bias"):
            for i in blocks.get(first + leaf, ()) if "{}" in file_name else ("0",):
                names = [target.replace("{}", i) + leaf for target in targets.split()]
                if all(name in left for name in names):
                    shapes = [left.pop(name) for name in names]
                    rows = [sum(shape[0] for shape in shapes)] if shapes[0] else []
                    renamed[file_name.replace("{}", i) + leaf] = (*rows, *shapes[0][1:])
    return left | renamed


def _number_last(name: str, parameters: Shapes) -> str:
    """Return ``name`` with {last} as the highest block number among ``parameters``."""
    if "{last}" not in name:
        return name
    blocks, rest = name.split("{last}")
    numbers = (int(p.removeprefix(blocks).split(".")[0]) for p in parameters if p.startswith(blocks))
    return f"{blocks}{max(numbers)}{rest}"


def _add(by_name, layout, parameters, file_name, targets):
    if targets[0] in parameters:  # whole tensors, named in full
        pattern = re.sub(r"\.\d+\.", ".{}.", targets[0])
        shape = parameters[targets[0]] if pattern in layout.reshaped else None
        by_name[targets[0]] = Source(file_name, shape=shape)
        return
    for leaf in (".weight", ".bias"):
        row = 0
        for target in targets:
            if target + leaf in parameters:
                next_row = row + parameters[target + leaf][0]
                end = None if len(targets) == 1 else next_row
                swap = target in layout.swapped
                by_name[target + leaf] = Source(key=file_name + leaf, lo=row, hi=end, swap=swap)
                row = next_row
