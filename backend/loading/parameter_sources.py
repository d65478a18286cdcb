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
from ..quantization.formats import Quantization
from ..quantization.packed import Packed, join
from .files.header_limits import is_number
from .files.safetensors_files import StoredSize, Weights


@dataclass(frozen=True)
class Source:
    """Rows lo..hi of the file's tensor ``key`` (hi None: all). swap: exchange halves; shape: view it so."""

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
        found = []
        for span in spans:  # the file has the second half first
            before = Span(span.lo, min(span.hi, half))
            after = Span(max(span.lo, half), span.hi)
            for part, shift in ((before, half), (after, -half)):
                if part.lo < part.hi:
                    found.append(Span(self.lo + part.lo + shift, self.lo + part.hi + shift))
        return found


def sources(layout: Layout, parameters: Shapes) -> dict[str, Source]:
    """Return parameter name -> Source, for a transformer with these parameter shapes."""
    by_name = {name: Source(name) for name in parameters}
    found = (int(part) for name in parameters for part in name.split(".") if part.isdigit())
    blocks = range(1 + max(found, default=0))
    last = [_number_last(name, parameters) for name in layout.swapped]
    swapped = tuple(name.replace("{}", str(i)) for name in last for i in blocks)
    layout = replace(layout, swapped=swapped)
    for file_name, targets in layout.names.items():
        numbers = map(str, blocks) if "{}" in file_name else ("0",)
        for i in numbers:
            modules = targets.replace("{}", i).split()
            _add(by_name, layout, parameters, file_name.replace("{}", i), modules)
    return by_name


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of that ``shape`` as ``files`` have it: in their tensor ``key``, as ``source`` says."""

    files: Weights
    key: str
    source: Source
    shape: tuple[int, ...]

    def check(self, file: str, family: str, name: str):
        """Refuse a tensor of another shape than the parameter ``name`` needs. Raises UnsupportedError."""
        have = self.files.shapes[self.key]
        source = self.source
        if source.shape is not None and math.prod(have) == math.prod(self.shape):
            return
        rows = have[0] if source.hi is None else min(source.hi, have[0]) - source.lo
        if (rows, *have[1:]) != self.shape:
            raise UnsupportedError(
                f"{file}: {quoted(name)} has shape {(rows, *have[1:])} in the file but {family} with this "
                f"configuration needs {self.shape}; the file is of another variant."
            )

    @property
    def quantization(self) -> Quantization | None:
        """How a quantized matrix is stored; None for what is none, or is viewed in another shape."""
        return None if self.source.shape is not None else self.files.quantization(self.key)

    @property
    def is_plain(self) -> bool:
        """Whether its rows are read and cast, and neither dequantized nor viewed in another shape."""
        return self.source.shape is None and self.files.is_plain(self.key)

    def read(self, dtype: torch.dtype, device: torch.device, shard: Shard | None = None) -> Tensor:
        """Read it in its own order and shape, or the rows and columns that ``shard`` keeps and no more."""
        if shard is not None:
            return self._read_shard(shard, dtype, device)
        source = self.source
        rows = slice(source.lo, source.hi) if source.hi is not None else slice(None)
        tensor = self.files.read(self.key, rows, dtype=dtype, device=device)
        if source.swap:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        return tensor if source.shape is None else tensor.reshape(source.shape)

    def _read_shard(self, shard: Shard, dtype: torch.dtype, device: torch.device) -> Tensor:
        columns = [slice(None)]
        if len(self.files.shapes[self.key]) > 1:
            columns = [span.indices for span in shard.inputs]
        below = []
        for span in self.source.rows(shard.outputs, self.shape[0]):
            pieces = [self.files.read(self.key, span.indices, each, dtype, device) for each in columns]
            below.append(cat_or_same(pieces, -1))  # one piece alone stays where it is mapped
        return cat_or_same(below, 0)

    def read_packed(self, device: torch.device, shard: Shard | None = None) -> Packed | None:
        """Read what ``read`` would as it is stored; None where it is no quantized matrix."""
        if self.quantization is None:
            return None
        own = shard or self._whole
        below = []
        for span in self.source.rows(own.outputs, self.shape[0]):
            row = []
            for columns in own.inputs:
                piece = self.files.packed(self.key, span.indices, columns.indices, device)
                assert piece is not None, "it has a quantization"
                row.append(piece)
            below.append(join(row, 1))
        return join(below, 0)

    def packed_sizes(self, shard: Shard | None) -> list[StoredSize] | None:
        """Measure what ``read_packed`` would read; None where it is no quantized matrix."""
        if self.quantization is None:
            return None
        own = shard or self._whole
        columns = [range(span.lo, span.hi) for span in own.inputs]
        return self.files.stored_sizes(self.key, sum(map(len, own.outputs)), columns)

    @property
    def _whole(self) -> Shard:
        return Shard((Span(0, self.shape[0]),), (Span(0, self.files.shapes[self.key][-1]),))


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
            numbers = blocks.get(first + leaf, ()) if "{}" in file_name else ("0",)
            for i in numbers:
                names = [target.replace("{}", i) + leaf for target in targets.split()]
                if not all(name in left for name in names):
                    continue
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


def _add(by_name: dict[str, Source], layout: Layout, parameters: Shapes, file_name: str, targets: list[str]):
    """Add the Source of each parameter that the file's module or tensor ``file_name`` holds."""
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
