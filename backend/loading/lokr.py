"""LoKr adapters (arXiv 2309.14859): Kronecker products of two matrices, each of which may be a product."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..parallel.sequence import Span
from ..quantization.added_products import BlockCut, Kronecker, cut_blocks
from .adapters import Factored, Spans, cut
from .lora_file_bytes import MAX_FACTORS


class LoKr(Factored):
    """Kronecker product of w1 and w2, either of which may be a product of two."""

    ROLES = (
        {"lokr_w1", "lokr_w2"},
        {"lokr_w1", "lokr_w2_a", "lokr_w2_b"},
        {"lokr_w1_a", "lokr_w1_b", "lokr_w2"},
        {"lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"},
    )
    PRODUCTS = (("lokr_w1_a", "lokr_w1_b"), ("lokr_w2_a", "lokr_w2_b"))

    @property
    def size(self):
        one = self._factor_shape("lokr_w1")
        two = self._factor_shape("lokr_w2")
        return one[0] * two[0], one[1] * two[1]

    @property
    def rank(self):
        roles = [role for role in ("lokr_w2_b", "lokr_w1_b") if role in self.keys]
        return self.shape_of(roles[0])[0] if roles else None

    @property
    def factor_rank(self):
        return self._inner("lokr_w1") * self._inner("lokr_w2")

    def factors(self, rows, columns, device):
        """Multiply the left and the right matrices: kron(a @ b, c @ d) = kron(a, c) @ kron(b, d)."""
        left, right = self._split("lokr_w1", device, sum(map(len, columns)) < self.shape[1])
        left_two, right_two = self._split("lokr_w2", device)
        ranks = Span(0, self.factor_rank)
        up = torch.cat([self._block(left, left_two, span, ranks) for span in rows])
        down = torch.cat([self._block(right, right_two, ranks, span) for span in columns], dim=1)
        return up, down

    @property
    def is_small(self) -> bool:
        """Return whether the Kronecker product is held in few numbers. The same on all ranks."""
        rows, columns = self.shape
        return self.held_numbers((Span(0, rows),), (Span(0, columns),)) <= MAX_FACTORS * rows * columns

    def held_numbers(self, rows: Spans, columns: Spans) -> int:
        """Count the numbers of ``kronecker``, from the headers alone."""
        (outer, height), (blocks, width) = (cut.numbers for cut in self._cuts(rows, columns))
        inner = self._kept_inner
        return outer * blocks + (inner * (height + width) if inner else height * width)

    def kronecker(self, rows: Spans, columns: Spans, device: torch.device, dtype: torch.dtype) -> Kronecker:
        """Return these rows and columns as a Kronecker product of strength 1, before alpha, of what the file
        has, or of w2 itself where that is smaller than its factors."""
        row_cut, column_cut = self._cuts(rows, columns)
        left = cut(self._factor("lokr_w1", device), _spans(row_cut.blocks), _spans(column_cut.blocks))
        inner_rows, inner_columns = _spans(row_cut.inner), _spans(column_cut.inner)
        if self._kept_inner:
            up = self._read("lokr_w2_a", device, rows=inner_rows)
            right = up, self._read("lokr_w2_b", device, columns=inner_columns)
        else:
            right = (cut(self._factor("lokr_w2", device), inner_rows, inner_columns),)
        tensors = [each.to(dtype) for each in right]
        return Kronecker(
            left.to(dtype),
            tuple(tensors),
            strength=1.0,
            rows=row_cut.runs,
            columns=column_cut.runs,
        )

    @property
    def _kept_inner(self) -> int:
        """The inner size of w2 where its two factors are held; 0 where w2 is."""
        if "lokr_w2" in self.keys:
            return 0
        height, width = self._factor_shape("lokr_w2")
        inner = self.shape_of("lokr_w2_b")[0]
        return inner if inner * (height + width) < height * width else 0

    def _cuts(self, rows: Spans, columns: Spans) -> tuple[BlockCut, BlockCut]:
        height, width = self._factor_shape("lokr_w2")
        return cut_blocks(_ranges(rows), height), cut_blocks(_ranges(columns), width)

    def _inner(self, name) -> int:
        """Return the inner size of the smallest product that w1 or w2 is: the file's, or with an identity."""
        inner = min(self._factor_shape(name))
        return inner if name in self.keys else min(inner, self.shape_of(f"{name}_b")[0])

    def _split(self, name, device, cut_columns=False) -> tuple[Tensor, Tensor]:
        """Return the smallest product that w1 or w2 is: of two, the one with more zeros in what is cut."""
        inner = self._inner(name)
        if name not in self.keys and inner == self.shape_of(f"{name}_b")[0]:
            return self._read(f"{name}_a", device), self._read(f"{name}_b", device)
        whole = self._factor(name, device)
        identity = torch.eye(inner, device=device)
        is_first = len(whole) == inner and not (cut_columns and whole.shape[1] == inner)
        return (identity, whole) if is_first else (whole, identity)

    def difference(self, rows, columns, device):
        """Compute no more rows than these, and read no more of w2: it may be large."""
        one = self._factor("lokr_w1", device)
        height = self._factor_shape("lokr_w2")[0]
        found = [torch.empty(0, sum(map(len, columns)), device=device)]
        for blocks, inner in (run for span in rows for run in _block_runs(span, height)):
            two = self._second(inner, device)
            every = Span(0, len(blocks) * len(inner))
            some = one[blocks.start : blocks.stop]
            found.append(torch.cat([self._block(some, two, every, span) for span in columns], dim=1))
        return torch.cat(found)

    def _second(self, rows: Span, device: torch.device) -> Tensor:
        """Return rows of w2."""
        if "lokr_w2" in self.keys:
            return self._read("lokr_w2", device, rows=(rows,))
        return self._read("lokr_w2_a", device, rows=(rows,)) @ self._read("lokr_w2_b", device)

    @staticmethod
    def _block(one, two, rows, columns):
        """Compute the blocks of the product that meet ``rows`` and ``columns``, cut to them."""
        height, width = two.shape
        first = rows.lo // height
        left = columns.lo // width
        blocks = one[first : -(-rows.hi // height), left : -(-columns.hi // width)]
        product = torch.kron(blocks.contiguous(), two)
        top = first * height
        edge = left * width
        return product[rows.lo - top : rows.hi - top, columns.lo - edge : columns.hi - edge]

    def _factor_shape(self, name):
        if name in self.keys:
            return self.shape_of(name)
        return self.shape_of(f"{name}_a")[0], self.shape_of(f"{name}_b")[1]

    def _factor(self, name, device):
        if name in self.keys:
            return self._read(name, device)
        return self._read(f"{name}_a", device) @ self._read(f"{name}_b", device)


def _ranges(spans: Spans) -> list[range]:
    return [range(span.lo, span.hi) for span in spans]


def _spans(runs: Iterable[range]) -> list[Span]:
    """Return runs as spans; one without rows where there are none."""
    return [Span(run.start, run.stop) for run in runs] or [Span(0, 0)]


def _block_runs(rows: Span, height: int) -> list[tuple[range, Span]]:
    """Return ``rows`` of a product as runs of blocks, each ``height`` rows of it, and which rows of each: the
    end of a block, whole blocks, the beginning of one."""
    if not len(rows):
        return []
    first, last = -(-rows.lo // height), rows.hi // height
    if first > last:  # within one block
        return [(range(last, first), Span(rows.lo - last * height, rows.hi - last * height))]
    runs = [
        (range(first - 1, first), Span(rows.lo - (first - 1) * height, height)),
        (range(first, last), Span(0, height)),
        (range(last, last + 1), Span(0, rows.hi - last * height)),
    ]
    is_met = (rows.lo < first * height, first < last, last * height < rows.hi)
    return [run for run, met in zip(runs, is_met) if met]
