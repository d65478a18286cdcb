"""How the changes of a quantized weight are held next to it: as products of small matrices where all of them
are such, else in a copy of the weight."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..parallel.sequence import Span
from ..quantization.added_products import AddedProduct, LowRank
from ..quantization.lora_bytes import LoraBytes
from .adapters import Adapter, Factored, Spans, cut, is_low_rank
from .lokr import LoKr
from .lora_keys import LoraUse
from .lora_selection import Target

#: Bytes of a factor of a row, in float32.
ROW_SCALE_BYTES = 4


@dataclass(frozen=True, eq=False)
class LoraChange:
    """The ``order``-th change of a stack: an adapter of its ``lora``-th LoRA, on one tensor."""

    order: int
    lora: int
    use: LoraUse
    target: Target
    adapter: Adapter

    @property
    def key(self) -> tuple:
        """Tells an adapter of a file from others, whatever its strength."""
        return self.use.path, self.use.stamp, *self.adapter.keys.values()

    @property
    def scaled_key(self) -> tuple:
        """Tells one whose rows are multiplied by what its magnitudes, or those after it, say."""
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
    """Adapters next to a weight by key, and what its rows are multiplied by."""

    adapters: dict[Hashable, AddedProduct]
    row_scale: Tensor | None = None


def is_kronecker(adapter: Adapter) -> TypeGuard[LoKr]:
    """Return whether nothing but a small Kronecker product is added."""
    return isinstance(adapter, LoKr) and not adapter.needs_the_whole and adapter.is_small


def is_product(adapter: Adapter) -> bool:
    """Return whether an adapter alone is held as a product."""
    return is_kronecker(adapter) or is_low_rank(adapter)


def are_products(adapters: Sequence[Adapter]) -> bool:
    """Return whether changes of one weight, in their order, are all held as products. Magnitudes scale
    rows of what was added before: a low-rank product bears that, a Kronecker product does not. The same on
    all ranks (see is_low_rank)."""
    scaled = first_unscaled(adapters)
    return all(map(is_low_rank, adapters[:scaled])) and all(map(is_product, adapters[scaled:]))


def first_unscaled(adapters: Sequence[Adapter]) -> int:
    """Return how many adapters there are up to the last one with magnitudes."""
    return max((i + 1 for i, each in enumerate(adapters) if each.needs_the_whole), default=0)


def added_bytes(
    changes: Sequence[LoraChange], shard: MatrixShard, dtype: torch.dtype, ranks: Mapping[tuple, int]
) -> LoraBytes:
    """Count what changes of a weight take next to it. ``ranks``: those that are known, by key."""
    rows, columns = (sum(map(len, spans)) for spans in (shard.rows, shard.columns))
    adapters = [change.adapter for change in changes]
    if not are_products(adapters):
        return LoraBytes(copies=rows * columns * dtype.itemsize)
    scaled = first_unscaled(adapters)
    by_key = {each.scaled_key: each for each in changes[:scaled]}
    by_key |= {each.key: each for each in changes[scaled:]}
    factors = uncut = 0
    for key, change in by_key.items():
        adapter = change.adapter
        if key == change.key and is_kronecker(adapter):
            uncut += adapter.held_numbers(shard.stored_rows(change), shard.columns)
            continue
        assert isinstance(adapter, Factored), "checked by are_products"
        factors += (ranks.get(change.key) or adapter.factor_rank) * (rows + columns)
    scale = rows * ROW_SCALE_BYTES if scaled else 0
    return LoraBytes(factors=factors * dtype.itemsize + scale, copies=0, uncut=uncut * dtype.itemsize)


def low_rank(change: LoraChange, where: Spans, columns: Spans, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what a change adds at strength 1 as two matrices in float32, before magnitudes."""
    assert isinstance(change.adapter, Factored), "checked by are_products"
    up, down = change.adapter.factors(where, columns, device)
    return up * change.adapter.scale, down


def plain(
    changes: Sequence[LoraChange],
    shard: MatrixShard,
    device: torch.device,
    dtype: torch.dtype,
    known: dict[Hashable, AddedProduct],
) -> HeldProducts:
    """Return changes without magnitudes; of those that are ``known``, the strength alone is new."""
    adapters: dict[Hashable, AddedProduct] = {}
    for change in changes:
        if change.key not in known:
            where = shard.stored_rows(change)
            if is_kronecker(change.adapter):
                made = change.adapter.kronecker(where, shard.columns, device, dtype)
            else:
                up, down = used(*low_rank(change, where, shard.columns, device))
                made = LowRank(up.to(dtype), down.to(dtype), strength=0.0)
            known[change.key] = made
        before = adapters.get(change.key)
        strength = change.use.strength + (before.strength if before else 0.0)
        adapters[change.key] = replace(known[change.key], strength=strength)
    return HeldProducts(adapters)


def with_magnitudes(
    changes: Sequence[LoraChange], shard: MatrixShard, weight: Tensor, dtype: torch.dtype
) -> HeldProducts:
    """Return changes some of which have magnitudes m of rows. One makes w + s (m / |w| (w + d) - w) of
    a row w (Adapter.applied_to), which is c w + s m / |w| d with c = 1 + s (m / |w| - 1): what was there
    before is multiplied by c. ``weight``: the stored values of these rows, all columns, in float32."""
    device = weight.device
    last = first_unscaled([change.adapter for change in changes])
    every = (Span(0, shard.width),)
    row_scale = torch.ones(len(weight), 1, device=device)
    factors: list[tuple[Tensor, Tensor]] = []
    for change in changes[:last]:
        where = shard.stored_rows(change)
        up, down = low_rank(change, where, every, device)
        if change.adapter.needs_the_whole:
            norm = weight.norm(dim=1) + torch.finfo(torch.float32).eps
            ratio = (change.adapter.magnitudes(where, device) / norm).unsqueeze(1)
            scale = 1 + change.use.strength * (ratio - 1)
            factors = [(scale * before, right) for before, right in factors]
            up, row_scale, weight = ratio * up, scale * row_scale, scale * weight
        factors.append((up, cut(down, None, shard.columns)))
        weight = weight + change.use.strength * (up @ down)
    adapters: dict[Hashable, AddedProduct] = {}
    for change, (up, down) in zip(changes, factors):
        up, down = used(up, down)
        adapters[change.scaled_key] = LowRank(up.to(dtype), down.to(dtype), strength=change.use.strength)
    rest, _ = plain(changes[last:], shard, device, dtype, {})
    return HeldProducts(adapters | rest, row_scale.flatten())


def used(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out what changes none of these rows, or reads none of these columns: where queries, keys and
    values are one tensor and their three LoRAs one product, each row has a third of it. A LoKr's factors have
    a block for each of its own."""
    is_used = up.ne(0).any(dim=0) & down.ne(0).any(dim=1)
    is_used[:1] |= not is_used.any()
    return (up, down) if is_used.all() else (up[:, is_used], down[is_used])
