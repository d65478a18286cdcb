"""The kinds of adapters in a LoRA file, each of which gives any rows and columns of its difference.

The formulas are ComfyUI's (comfy/weight_adapter), in float32: LoRA (arXiv 2106.09685), LoHa (arXiv
2309.14859), whole differences, and LyCORIS' form of DoRA's magnitudes (arXiv 2402.09353). lokr.py has LoKr.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self, TypeGuard

import torch
from torch import Tensor

from ...parallel.comm import cat_or_same
from ...parallel.sequence import Span
from ..files.safetensors_files import TensorFiles
from ..staging import upload
from .lora_file_bytes import MAX_FACTORS, matrix

Spans = Iterable[Span]
MatrixShape = tuple[int, int]
#: Roles that say how much of an adapter is added.
SCALES = {"alpha", "dora_scale"}


@dataclass(frozen=True)
class Adapter(ABC):
    """A change of a tensor, seen as a matrix of ``shape``; ``keys``: role -> key in ``files``. ``shared``:
    what all rows need and was read before; None: nothing is held."""

    files: TensorFiles
    keys: Mapping[str, str]
    shape: MatrixShape
    shared: dict[tuple, Tensor] | None = field(default=None, kw_only=True, compare=False)

    #: Sets of roles, one of which a file must have in full.
    ROLES = ()
    #: Pairs of roles whose matrices are multiplied, where a file has both.
    PRODUCTS: ClassVar[tuple[tuple[str, str], ...]] = ()

    @property
    @abstractmethod
    def size(self) -> MatrixShape:
        """Rows and columns of the difference, from the headers alone."""

    @property
    def rank(self) -> int | None:
        """What alpha is divided by; None where this kind has no alpha."""
        return None

    @abstractmethod
    def difference(self, rows: Spans, columns: Spans, device: torch.device) -> Tensor:
        """Compute these rows and columns of the difference, in float32; read only what they need."""

    @property
    def products(self) -> list[tuple[str, str]]:
        """Roles of the matrices that are multiplied, left and right."""
        return [pair for pair in self.PRODUCTS if self.keys.keys() >= set(pair)]

    @property
    def elementwise_sizes(self) -> set[MatrixShape]:
        """Sizes of the matrices that are multiplied entry by entry, which must be one."""
        return {self.size}

    @property
    def weights(self) -> list[str]:
        """Roles of the tensors that make the difference."""
        return [role for role in self.keys if role not in SCALES]

    def shape_of(self, role: str) -> MatrixShape:
        """Return the shape of the file's tensor of that role, seen as a matrix."""
        return matrix(self.files.shapes[self.keys[role]])

    @cached_property
    def scale(self) -> float:
        """alpha / rank; 1 where the file names no alpha."""
        if "alpha" not in self.keys or not self.rank:
            return 1.0
        return self.files.read(self.keys["alpha"]).float().item() / self.rank

    @property
    def needs_the_whole(self) -> bool:
        """Return whether one entry of the result depends on entries of the weight other than its own."""
        return "dora_scale" in self.keys

    @property
    def scales_rows(self) -> bool:
        """Return whether magnitudes are of rows: each row of the result depends on that of the weight."""
        return "dora_scale" in self.keys and self.shape_of("dora_scale") == (self.shape[0], 1)

    @property
    def scales_columns(self) -> bool:
        """Return whether magnitudes are of columns: each depends on the same column with the difference."""
        return self.needs_the_whole and not self.scales_rows

    def magnitudes(self, rows: Spans, columns: Spans, device: torch.device) -> Tensor:
        """Read the magnitudes of these rows where it ``scales_rows``, else of these columns."""
        if self.scales_rows:
            return self._read("dora_scale", device, rows=rows).flatten()
        return self._read("dora_scale", device, columns=columns).flatten()

    def for_many_rows(self) -> Self:
        """Return an adapter that reads what all rows need, as a LoRA's ``down``, once and holds it."""
        return replace(self, shared={})

    def add_to(self, weight: Tensor, strength: float, rows: Spans, columns: Spans) -> Tensor:
        """Return ``weight`` (float32), these rows and columns of it, with the adapter."""
        return weight + strength * self.scale * self.difference(rows, columns, weight.device)

    def applied_to(self, weight: Tensor, strength: float) -> Tensor:
        """Return the whole ``weight`` (float32, of ``shape``) with the adapter."""
        everything = (Span(0, self.shape[0]),), (Span(0, self.shape[1]),)
        if not self.needs_the_whole:
            return self.add_to(weight, strength, *everything)
        magnitude = self._read("dora_scale", weight.device)
        updated = weight + self.scale * self.difference(*everything, weight.device)
        if magnitude.shape[0] == weight.shape[0]:
            norm = weight.norm(dim=1, keepdim=True)
        else:
            norm = updated.norm(dim=0, keepdim=True)
        norm = norm + torch.finfo(torch.float32).eps
        return weight + strength * (updated * (magnitude / norm) - weight)

    def _read(
        self, role: str, device: torch.device, rows: Spans | None = None, columns: Spans | None = None
    ) -> Tensor:
        """Read rows and columns (all by default) of the file's tensor, as a matrix in float32."""
        if rows is not None or self.shared is None:
            return self._read_anew(role, device, rows, columns)
        which = role, device, None if columns is None else tuple(columns)
        if which not in self.shared:
            self.shared[which] = self._read_anew(role, device, None, columns)
        return self.shared[which]

    def _read_anew(
        self, role: str, device: torch.device, rows: Spans | None, columns: Spans | None
    ) -> Tensor:
        key = self.keys[role]
        if len(self.files.shapes[key]) == 2:
            blocks = [[self.files.read(key, r, c) for c in _slices(columns)] for r in _slices(rows)]
            return _copied(_concatenated(blocks), device)
        whole = self.files.read(key).reshape(matrix(self.files.shapes[key]))
        return _copied(cut(whole, rows, columns), device)


class Factored(Adapter):
    """One product of two matrices, or several multiplied entry by entry: a product of two too, exactly."""

    @property
    def size(self):
        left, right = self.PRODUCTS[0]
        return self.shape_of(left)[0], self.shape_of(right)[1]

    @property
    def elementwise_sizes(self):
        return {(self.shape_of(left)[0], self.shape_of(right)[1]) for left, right in self.products}

    @property
    def rank(self):
        return self.shape_of(self.PRODUCTS[0][1])[0]

    @property
    def factor_rank(self) -> int:
        """Return the rank of ``factors`` for all rows and columns, from the headers alone."""
        return math.prod(self.shape_of(right)[0] for _, right in self.products)

    @abstractmethod
    def factors(self, rows: Spans, columns: Spans, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (rows, rank) and (rank, columns), whose product is the difference."""


class LoRA(Factored):
    """up @ down."""

    ROLES = ({"up", "down"},)
    PRODUCTS = (("up", "down"),)

    def factors(self, rows, columns, device):
        return self._read("up", device, rows=rows), self._read("down", device, columns=columns)

    def difference(self, rows, columns, device):
        up, down = self.factors(rows, columns, device)
        return up @ down


@dataclass(frozen=True)
class LoRAByHead(LoRA):
    """A LoRA of q, k and v whose ``up`` is stored head by head: ``head`` rows of q, of k, of v, and again."""

    head: int = 0

    def factors(self, rows, columns, device):
        up = self._read("up", device, rows=self._stored_rows(rows))
        return up, self._read("down", device, columns=columns)

    def _stored_rows(self, rows: Spans) -> list[Span]:
        """Return where the file has these rows of all q, all k, all v."""
        stored = []
        for span in rows:
            row = span.lo
            while row < span.hi:
                part, inside = divmod(row, self.shape[0] // 3)
                number, offset = divmod(inside, self.head)
                first = (3 * number + part) * self.head + offset
                length = min(self.head - offset, span.hi - row)
                stored.append(Span(first, first + length))
                row += length
        return stored


class LoHa(Factored):
    """(w1_a @ w1_b) * (w2_a @ w2_b)."""

    ROLES = ({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"},)
    PRODUCTS = (("hada_w1_a", "hada_w1_b"), ("hada_w2_a", "hada_w2_b"))

    def factors(self, rows, columns, device):
        """Multiply each pair of columns of the left matrices, and of rows of the right ones."""
        one, two = (self._read(left, device, rows=rows) for left, _ in self.products)
        up = one.unsqueeze(2) * two.unsqueeze(1)
        one, two = (self._read(right, device, columns=columns) for _, right in self.products)
        down = one.unsqueeze(1) * two
        return up.flatten(1), down.flatten(0, 1)

    def difference(self, rows, columns, device):
        factors = [
            self._read(left, device, rows=rows) @ self._read(right, device, columns=columns)
            for left, right in self.products
        ]
        return factors[0] * factors[1]


class Difference(Adapter):
    """The difference itself, in the tensor's own shape or flat."""

    ROLES = ({"difference"},)

    @property
    def size(self):
        shape = self.files.shapes[self.keys["difference"]]
        return self.shape if shape == (math.prod(self.shape),) else matrix(shape)

    def difference(self, rows, columns, device):
        if len(self.files.shapes[self.keys["difference"]]) == 2:
            return self._read("difference", device, rows, columns)
        whole = self.files.read(self.keys["difference"], device=device).reshape(self.shape).float()
        return cut(whole, rows, columns)


def is_low_rank(adapter: Adapter) -> TypeGuard[Factored]:
    """Return whether a product of two small matrices is all that is added, to rows or columns that may be
    scaled. The same on all ranks: native products that compare values over ranks wait for each other."""
    if not isinstance(adapter, Factored):
        return False
    rows, columns = adapter.shape
    return isinstance(adapter, LoRA) or adapter.factor_rank * (rows + columns) <= MAX_FACTORS * rows * columns


def cut(whole: Tensor, rows: Spans | None, columns: Spans | None) -> Tensor:
    """Return rows and columns (None: all) of a matrix."""
    return _concatenated([[whole[r, c] for c in _slices(columns)] for r in _slices(rows)])


def _copied(stored: Tensor, device: torch.device) -> Tensor:
    """Copy to ``device`` as stored, then to float32: nothing stays in the file, which may be overwritten."""
    return upload(stored, device).to(torch.float32, copy=True)


def _concatenated(blocks: list[list[Tensor]]) -> Tensor:
    """Join rows of blocks to a matrix; a single block is that matrix, not a copy."""
    return cat_or_same([cat_or_same(row, dim=1) for row in blocks])


def _slices(spans: Spans | None) -> list[slice]:
    return [slice(None)] if spans is None else [span.indices for span in spans]
