"""What LoRAs add to the products of a quantized weight, held as small matrices next to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .packed import columns_of

#: Most tokens that a Kronecker product multiplies at a time: between its matrices, and where it is cut, it
#: makes tensors as wide as its inputs or its outputs.
MAX_TOKENS = 4096


class Scales(NamedTuple):
    """Float32 factors of a matrix's rows, and of its columns (DoRA); None: 1."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in self if each is not None]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Scales":
        """Return what ``fn`` makes of each."""
        return Scales(*(None if each is None else fn(each) for each in self))


@dataclass
class LowRank:
    """A LoRA next to a weight: ``strength`` x ``up`` (rows, rank) x ``down`` (rank, columns). strengths: of
    each rank relative to ``strength``, where it stands for several (joined)."""

    up: Tensor
    down: Tensor
    strength: float
    strengths: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.up, self.down]

    def move(self, fn: Callable[[Tensor], Tensor]):
        """Replace what it holds, as nn.Module._apply does."""
        self.up, self.down = fn(self.up), fn(self.down)
        self.strengths = None if self.strengths is None else fn(self.strengths)

    def difference(self) -> Tensor:
        """Return what it adds to the weight, as a whole, in float32."""
        return self.strength * (self.up.float() @ self.down.float())

    def add_to(self, out: Tensor, x: Tensor):
        """Add the product with ``x`` to ``out`` (..., rows) in place: nothing else of its size is made."""
        inner = F.linear(x, self.down)
        if self.strengths is not None:
            inner *= self.strengths
        rows = out.view(-1, out.shape[-1])  # a product's own memory: one row after the other
        rows.addmm_(inner.reshape(-1, inner.shape[-1]), self.up.t(), alpha=self.strength)


@dataclass(frozen=True)
class BlockCut:
    """Some rows, or columns, of a Kronecker product. blocks: runs of rows of the first matrix, one block of
    the product each; inner: runs of rows of the second. runs: which rows of those blocks; None: all."""

    blocks: tuple[range, ...]
    inner: tuple[range, ...]
    runs: tuple[range, ...] | None = None

    @property
    def numbers(self) -> tuple[int, int]:
        """How many rows of the first matrix are needed, and of the second."""
        return sum(map(len, self.blocks)), sum(map(len, self.inner))


def cut_blocks(wanted: Sequence[range], size: int) -> BlockCut:
    """Cut a Kronecker product whose second matrix has ``size`` rows to runs of its own: whole blocks, and
    what is too much of them, unless one block has them all."""
    wanted = [run for run in wanted if len(run)]
    met = [range(run.start // size, -(-run.stop // size)) for run in wanted]
    if all(each == met[0] and len(each) == 1 for each in met):
        starts = [each.start * size for each in met]
        inner = tuple(range(run.start - at, run.stop - at) for run, at in zip(wanted, starts))
        return BlockCut(tuple(met[:1]), inner)
    runs = []
    offset = 0
    for run, each in zip(wanted, met):
        shift = offset - each.start * size
        runs.append(range(run.start + shift, run.stop + shift))
        offset += len(each) * size
    is_all = sum(map(len, runs)) == offset
    return BlockCut(blocks=tuple(met), inner=(range(size),), runs=None if is_all else tuple(runs))


@dataclass
class Kronecker:
    """``strength`` x the Kronecker product of ``left`` and of the product of ``right`` (one or two matrices),
    next to a weight. rows, columns: runs of its own that the weight has; None: all. scales: of those."""

    left: Tensor
    right: tuple[Tensor, ...]
    strength: float
    rows: tuple[range, ...] | None = None
    columns: tuple[range, ...] | None = None
    scales: Scales = Scales()

    @property
    def tensors(self) -> list[Tensor]:
        return [self.left, *self.right, *self.scales.tensors]

    def move(self, fn: Callable[[Tensor], Tensor]):
        """Replace what it holds, as nn.Module._apply does."""
        self.left, self.right = fn(self.left), tuple(map(fn, self.right))
        self.scales = self.scales.map(fn)

    def difference(self) -> Tensor:
        """Return what it adds to the weight, as a whole, in float32."""
        first, *second = (each.float() for each in (self.left, *self.right))
        inner = second[0] if len(second) == 1 else second[0] @ second[1]
        found = torch.kron(first, inner.contiguous()) if self.columns is None else self._cut(first, inner)
        if self.rows is not None:
            found = torch.cat([found[run.start : run.stop] for run in self.rows])
        found = scaled(found, *self.scales)
        return found if self.strength == 1 else found.mul_(self.strength)

    def _cut(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the product's own ``columns``, each from its two columns: whole blocks are not made."""
        runs = [torch.arange(run.start, run.stop, device=first.device) for run in self.columns or ()]
        columns = torch.cat(runs)
        width = second.shape[1]
        ours = first[:, columns // width].unsqueeze(1)
        return (ours * second[:, columns % width]).flatten(0, 1)

    def add_to(self, out: Tensor, x: Tensor):
        """Add the product with ``x`` to ``out`` (..., rows) in place, MAX_TOKENS at a time for memory."""
        if not (x.numel() and out.numel()):
            return
        rows = out.view(-1, out.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        for some_rows, some_inputs in zip(rows.split(MAX_TOKENS), inputs.split(MAX_TOKENS)):
            self._add_to_rows(some_rows, some_inputs)

    def _add_to_rows(self, rows: Tensor, x: Tensor):
        """Add the product with ``x`` (tokens, columns) to ``rows`` (tokens, rows)."""
        x = scaled(x, None, self.scales.columns)
        if self.rows is None and self.scales.rows is None and rows.is_contiguous():
            self._add_blocks(rows, self._blocks_of(x))
            return
        height, width = len(self.left), len(self.right[0])
        whole = rows.new_zeros(len(rows), height * width)
        self._add_blocks(whole, self._blocks_of(x))
        own = whole if self.rows is None else columns_of(whole, self.rows)
        if self.scales.rows is not None:
            own *= self.scales.rows
        rows += own

    def _blocks_of(self, x: Tensor) -> Tensor:
        """Return ``x`` (tokens, columns) as (tokens, blocks, inner columns), with zeros where it has none."""
        blocks, width = self.left.shape[1], self.right[-1].shape[1]
        if self.columns is not None:
            whole = x.new_zeros(len(x), blocks * width)
            own = x.split([len(run) for run in self.columns], dim=1)
            for run, part in zip(self.columns, own):
                whole[:, run.start : run.stop] = part
            x = whole
        return x.view(len(x), blocks, width)

    def _add_blocks(self, out: Tensor, x: Tensor):
        """Add the product with ``x`` to ``out`` (tokens, all rows), in the order that computes less."""
        tokens, blocks, width = x.shape
        outer, rows = len(self.left), len(self.right[0])
        numbers = sum(each.numel() for each in self.right)
        left = self.left.expand(tokens, outer, blocks)
        if blocks * (numbers + outer * rows) <= outer * (numbers + blocks * width):
            for each in reversed(self.right):
                x = F.linear(x, each)
            out.view(tokens, outer, rows).baddbmm_(left, x, alpha=self.strength)
            return
        # with the strength in it: where alpha is small, sums of blocks alone are more than float16 holds
        x = torch.baddbmm(x.new_empty(1), left, x, beta=0, alpha=self.strength).flatten(0, 1)
        for each in reversed(self.right[1:]):
            x = F.linear(x, each)
        out.view(-1, rows).addmm_(x, self.right[0].t())


AddedProduct = LowRank | Kronecker


def concatenated(adapters: Sequence[LowRank]) -> LowRank | None:
    """Concatenate several LoRAs into one product; the given ones become views of it. None for none. So the
    outputs of a layer are read and written once, however many LoRAs there are."""
    if len(adapters) < 2:
        for each in adapters:  # alone, it does not keep what it was a part of
            if each.up.untyped_storage().nbytes() > each.up.nbytes:
                each.up, each.down = each.up.clone(), each.down.clone()
        return adapters[0] if adapters else None
    up = torch.cat([each.up for each in adapters], dim=1)
    down = torch.cat([each.down for each in adapters])
    together = LowRank(up, down, strength=1.0)
    divide(together, adapters)
    return at_strengths(together, adapters)


def divide(together: LowRank, adapters: Sequence[LowRank]):
    """Make adapters the parts of what stands for all of them."""
    ranks = [len(each.down) for each in adapters]
    for each, *parts in zip(adapters, together.up.split(ranks, dim=1), together.down.split(ranks)):
        each.up, each.down = parts


def at_strengths(together: LowRank, adapters: Sequence[LowRank]) -> LowRank:
    """Return what stands for several LoRAs at their strengths. The largest one stays a number, which products
    multiply by in float32; others are relative to it, since they multiply what may be in float16."""
    largest = max(abs(each.strength) for each in adapters) or 1.0
    each_rank = [each.strength / largest for each in adapters for _ in range(len(each.down))]
    strengths = torch.tensor(each_rank, device=adapters[0].down.device)
    return replace(together, strength=largest, strengths=strengths)


def scaled(x: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Multiply rows and columns of ``x`` by float32 factors (None: 1); round once to the type of ``x``."""
    if rows is None:
        # nothing in float32 is made of what may be a layer's whole input
        return x if columns is None else torch.mul(x, columns, out=torch.empty_like(x))
    by_rows = x * rows.unsqueeze(1)
    return (by_rows if columns is None else by_rows * columns).to(x.dtype)
