"""How changes of a quantized weight are held next to it: as products of small matrices where all of them are
such, else in a copy of the weight."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ...parallel.sequence import Span
from ...quantization.added_products import AddedProduct, LowRank, Scales, scaled
from ...quantization.lora_bytes import LoraBytes
from .adapters import Adapter, Factored, Spans, is_low_rank
from .lokr import LoKr
from .lora_file_bytes import SCALE_BYTES
from .lora_keys import LoraUse
from .lora_targets import Target


@dataclass(frozen=True, eq=False)
class LoraChange:
    """The ``order``-th change of a stack: an adapter of its ``lora``-th LoRA, on one tensor."""

    order: int
    lora: int
    use: LoraUse
    target: Target
    adapter: Adapter

    @property
    def strength(self) -> float:
        """What its product is multiplied by. Factors stay as the file has them: alpha / rank would make the
        values of small ones so small that float16 has few bits for them, or none."""
        return self.use.strength * self.adapter.scale

    def for_many_rows(self) -> "LoraChange":
        """Return the change by an adapter that reads what all rows need once, and holds it."""
        return replace(self, adapter=self.adapter.for_many_rows())

    @property
    def key(self) -> tuple:
        """Tells an adapter of a file from others, whatever its strength."""
        return self.use.path, self.use.stamp, *self.adapter.keys.values()

    @property
    def scaled_key(self) -> tuple:
        """Tells one that is multiplied by what its magnitudes, or those after it, say."""
        return self.order, *self.key


class MatrixShard(NamedTuple):
    """Rows and columns that a rank has of the parameter ``name``, a matrix of height x width."""

    name: str
    rows: Spans
    columns: Spans
    height: int
    width: int

    def stored_rows(self, change: LoraChange) -> list[Span]:
        """Return where the rows are in the tensor that is changed."""
        return change.target.pieces[self.name].rows(self.rows, self.height)


class HeldProducts(NamedTuple):
    """Adapters next to a weight by key, and the float32 factors of its rows and columns (DoRA)."""

    adapters: dict[Hashable, AddedProduct]
    scales: Scales = Scales()


def is_kronecker(adapter: Adapter) -> TypeGuard[LoKr]:
    """Return whether only a small Kronecker product is added, to rows or columns that may be scaled."""
    return isinstance(adapter, LoKr) and adapter.is_small


def is_product(adapter: Adapter) -> bool:
    """Return whether an adapter alone is held as a product."""
    return is_kronecker(adapter) or is_low_rank(adapter)


def are_products(adapters: Sequence[Adapter]) -> bool:
    """Return whether all changes of a weight are held as products: the same on all ranks (is_low_rank)."""
    return all(map(is_product, adapters))


def first_unscaled(adapters: Iterable[Adapter]) -> int:
    """Return how many adapters there are up to the last one with magnitudes."""
    return past_last(each.needs_the_whole for each in adapters)


def past_last(flags: Iterable[bool]) -> int:
    """Return how many there are up to the last one that is true."""
    return max((i + 1 for i, flag in enumerate(flags) if flag), default=0)


def added_bytes(
    changes: Sequence[LoraChange], shard: MatrixShard, dtype: torch.dtype, factor_ranks: Mapping[tuple, int]
) -> LoraBytes:
    """Count what changes of a weight take next to it. ``factor_ranks``: key -> rank of the low-rank products
    that were held before."""
    rows, columns = (sum(map(len, spans)) for spans in (shard.rows, shard.columns))
    adapters = [change.adapter for change in changes]
    if not are_products(adapters):
        return LoraBytes(copies=rows * columns * dtype.itemsize)
    with_factors = first_unscaled(adapters)
    # changes before these are scaled by rows, and by columns
    rows_until = past_last(each.scales_rows for each in adapters)
    columns_until = past_last(each.scales_columns for each in adapters)
    by_key = {each.scaled_key: (i, each) for i, each in enumerate(changes[:with_factors])}
    by_key |= {each.key: (with_factors, each) for each in changes[with_factors:]}
    factors = uncut = 0
    scales = (rows if rows_until else 0) + (columns if columns_until else 0)
    for i, change in by_key.values():
        adapter = change.adapter
        if is_kronecker(adapter):
            uncut += adapter.held_numbers(shard.stored_rows(change), shard.columns)
            scales += (rows if i < rows_until else 0) + (columns if i < columns_until else 0)
            continue
        assert isinstance(adapter, Factored), "checked by are_products"
        factors += (factor_ranks.get(change.key) or adapter.factor_rank) * (rows + columns)
    size = factors * dtype.itemsize + scales * SCALE_BYTES
    return LoraBytes(factors=size, copies=0, uncut=uncut * dtype.itemsize)


def product_of(
    change: LoraChange, shard: MatrixShard, device: torch.device, dtype: torch.dtype, scales: Scales
) -> AddedProduct:
    """Return what a change adds to a weight, held in ``dtype``. ``scales``: float32 factors of its rows and
    columns, by magnitudes."""
    where = shard.stored_rows(change)
    if is_kronecker(change.adapter):
        bare = change.adapter.kronecker(where, shard.columns, device, dtype)
        return replace(bare, strength=change.strength, scales=scales)
    assert isinstance(change.adapter, Factored), "checked by are_products"
    up, down = change.adapter.factors(where, shard.columns, device)
    up, down = without_unused(scaled(up, scales.rows, None), scaled(down, None, scales.columns))
    return LowRank(up.to(dtype), down.to(dtype), strength=change.strength)


def plain(
    changes: Sequence[LoraChange],
    shard: MatrixShard,
    device: torch.device,
    dtype: torch.dtype,
    known: dict[Hashable, AddedProduct],
) -> HeldProducts:
    """Hold changes without magnitudes; products that are not ``known`` are made and added to it."""
    adapters: dict[Hashable, AddedProduct] = {}
    for change in changes:
        if change.key not in known:
            known[change.key] = product_of(change, shard, device, dtype, Scales())
        before = adapters.get(change.key)
        strength = change.strength + (before.strength if before else 0.0)
        adapters[change.key] = replace(known[change.key], strength=strength)
    return HeldProducts(adapters)


def without_unused(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out what changes none of these rows, or reads none of these columns: where queries, keys and
    values are one tensor and their three LoRAs one product, each row has a third of it."""
    is_used = up.ne(0).any(dim=0) & down.ne(0).any(dim=1)
    is_used[:1] |= not is_used.any()
    return (up, down) if is_used.all() else (up[:, is_used], down[is_used])
