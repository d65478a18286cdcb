"""LoKr adapters (arXiv 2309.14859): Kronecker products of two matrices, each of which may be a product."""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from ...parallel.comm import cat_or_same
from ...parallel.sequence import Span
from ...quantization.added_products import BlockCut, Kronecker, cut_blocks
from .adapters import Adapter, Spans, cut
from .lora_file_bytes import MAX_FACTORS, sides


class LoKr(Adapter):
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
    def is_small(self) -> bool:
        """Return whether the Kronecker product is held in few numbers. The same on all ranks."""
        rows, columns = self.shape
        return self.held_numbers((Span(0, rows),), (Span(0, columns),)) <= MAX_FACTORS * rows * columns

    def held_numbers(self, rows: Spans, columns: Spans) -> int:
        """Count the numbers of ``kronecker``, from the headers alone."""
        (outer, height), (blocks, width) = (cut.numbers for cut in self._cuts(rows, columns))
        inner = self._held_inner
        return outer * blocks + (inner * (height + width) if inner else height * width)

    def kronecker(
        self, rows: Spans, columns: Spans, device: torch.device, dtype: torch.dtype, w1: Tensor | None = None
    ) -> Kronecker:
        """Return these rows and columns as a Kronecker product of strength 1, before alpha, of what the file
        has, or of w2 itself where that is smaller than its factors. ``w1``: if it was read before."""
        row_cut, column_cut = self._cuts(rows, columns)
        w1 = self._factor("lokr_w1", device) if w1 is None else w1
        left = cut(w1, _spans(row_cut.blocks), _spans(column_cut.blocks))
        inner_rows, inner_columns = _spans(row_cut.inner), _spans(column_cut.inner)
        if self._held_inner:
            up = self._read("lokr_w2_a", device, rows=inner_rows)
            right = up, self._read("lokr_w2_b", device, columns=inner_columns)
        else:
            right = (self._factor("lokr_w2", device, inner_rows, inner_columns),)
        right = tuple(each.to(dtype) for each in right)
        return Kronecker(left.to(dtype), right, strength=1.0, rows=row_cut.runs, columns=column_cut.runs)

    @property
    def _held_inner(self) -> int:
        """The inner size of w2 where its two factors are held; 0 where w2 is."""
        if "lokr_w2" in self.keys:
            return 0
        height, width = self._factor_shape("lokr_w2")
        inner = self.shape_of("lokr_w2_b")[0]
        return inner if inner * (height + width) < height * width else 0

    def _cuts(self, rows: Spans, columns: Spans) -> tuple[BlockCut, BlockCut]:
        height, width = self._factor_shape("lokr_w2")
        return cut_blocks(_ranges(rows), height), cut_blocks(_ranges(columns), width)

    def difference(self, rows, columns, device):
        """Compute no more rows than these, and read no more of w2: it may be large. w1 is read once."""
        height = self._factor_shape("lokr_w2")[0]
        runs = [run for span in rows for run in _block_runs(span, height)]
        if not runs:
            return torch.empty(0, sum(map(len, columns)), device=device)
        w1 = self._factor("lokr_w1", device)
        products = (self.kronecker((run,), columns, device, torch.float32, w1) for run in runs)
        return cat_or_same([product.difference() for product in products], 0)

    def _factor_shape(self, name):
        return sides({role: self.files.shapes[key] for role, key in self.keys.items()}, name)

    def _factor(self, name, device, rows=None, columns=None):
        """Compute rows and columns (None: all) of w1 or w2."""
        if name in self.keys:
            return self._read(name, device, rows, columns)
        return self._read(f"{name}_a", device, rows=rows) @ self._read(f"{name}_b", device, columns=columns)


def _ranges(spans: Spans) -> list[range]:
    return [range(span.lo, span.hi) for span in spans]


def _spans(runs: Iterable[range]) -> list[Span]:
    """Return runs as spans; one without rows where there are none."""
    return [Span(run.start, run.stop) for run in runs] or [Span(0, 0)]


def _block_runs(rows: Span, height: int) -> list[Span]:
    """Cut ``rows`` of a product, whose blocks have ``height``: the end of one, whole ones, a beginning."""
    first = min(rows.hi, -(-rows.lo // height) * height)
    last = max(first, rows.hi // height * height)
    edges = [rows.lo, first, last, rows.hi]
    return [Span(lo, hi) for lo, hi in pairwise(edges) if lo < hi]
