"""What magnitudes (DoRA, arXiv 2402.09353) make of the changes next to a quantized weight: factors of its
rows and columns.

Magnitudes m of rows make w + s (m / |w| (w + d) - w) of a row w with the difference d (Adapter.applied_to).
That is c w + s m / |w| d with c = 1 + s (m / |w| - 1): what was there before is multiplied by c. Those of
columns do the same with columns, and |w + d| for |w|. So the stored weight and every change before stay
products of their own, with factors for their rows and their columns.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..parallel.matrix_cuts import Shard
from ..parallel.sequence import Span
from ..quantization.added_products import AddedProduct, LowRank
from .adapters import Spans, cut
from .checkpoint import Checkpoint
from .lora_file_bytes import matrix
from .lora_products import (
    HeldProducts,
    LoraChange,
    MatrixShard,
    first_unscaled,
    is_kronecker,
    low_rank,
    plain,
    used,
)

#: Added to norms, as in ComfyUI.
EPSILON = torch.finfo(torch.float32).eps


class Scales(NamedTuple):
    """Factors of rows, and of columns; None: 1."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def times(self, other: "Scales") -> "Scales":
        """Return the factors of both, one after the other."""
        return Scales(*(_product(one, two) for one, two in zip(self, other)))

    def of(self, x: Tensor) -> Tensor:
        """Multiply a matrix, in place."""
        for factors, dim in zip(self, (1, 0)):
            if factors is not None:
                x *= factors.unsqueeze(dim)
        return x

    def cut(self, rows: Spans | None, columns: Spans | None) -> "Scales":
        """Return those of some rows and columns (None: of all)."""
        return Scales(*(_cut(each, spans) for each, spans in zip(self, (rows, columns))))


#: Factors of the stored weight (None) and of changes, by their order.
WeightScales = dict[int | None, Scales]


@dataclass
class FollowedWeight:
    """A weight as its changes make it one after the other. value: these ``rows`` of a parameter of
    ``height``, in float32."""

    value: Tensor
    rows: Spans
    height: int
    scales: WeightScales = field(default_factory=lambda: {None: Scales()})

    def stored_rows(self, name: str, change: LoraChange) -> list[Span]:
        """Return where the rows are in the tensor that is changed."""
        return change.target.pieces[name].rows(self.rows, self.height)

    def add(self, change: LoraChange, updated: Tensor, ratio: Scales):
        """Have a change in it: ``updated`` at strength 1, but for its ``ratio`` of magnitudes to norms."""
        strength = change.use.strength
        of_earlier = Scales(*(None if each is None else 1 + strength * (each - 1) for each in ratio))
        self.scales = {order: each.times(of_earlier) for order, each in self.scales.items()}
        self.scales[change.order] = ratio
        self.value.lerp_(ratio.of(updated), strength)


def weight_scales(
    changes: Sequence[LoraChange],
    spans: Mapping[str, tuple[Spans, Spans]],
    checkpoint: Checkpoint,
    read_on: torch.device,
    device: torch.device,
) -> dict[str, WeightScales]:
    """Compute the factors of weights that depend on each other, for the rows and columns of each that
    ``spans`` has.

    changes: of all of them, in order, some with magnitudes. Norms are over whole rows, or over whole columns
    of all weights that a change is for: those values are read whichever rank holds them.
    """
    changes = changes[: first_unscaled([change.adapter for change in changes])]
    scale_rows = [each.adapter.scales_rows for each in changes if each.adapter.needs_the_whole]
    all_rows = not all(scale_rows)
    all_columns = any(scale_rows) or len({tuple(columns) for _, columns in spans.values()}) > 1
    followed = {}
    wanted: Spans = ()
    for name, (rows, columns) in spans.items():
        height, width = matrix(checkpoint.shapes[name])
        needed = (Span(0, height),) if all_rows else rows
        wanted = (Span(0, width),) if all_columns else columns
        value = checkpoint.read(name, torch.float32, read_on, Shard(tuple(needed), tuple(wanted)))
        followed[name] = FollowedWeight(value.to(device, copy=True), needed, height)
    for change in changes:
        _follow(change, {name: followed[name] for name in change.target.pieces if name in followed}, wanted)
    found = {}
    for name, (rows, columns) in spans.items():
        own = rows if all_rows else None, columns if all_columns else None
        found[name] = {order: each.cut(*own) for order, each in followed[name].scales.items()}
    return found


def _follow(change: LoraChange, weights: Mapping[str, FollowedWeight], columns: Spans):
    """Apply a change to the values of the ``weights`` that it is for."""
    adapter = change.adapter
    updated = {}
    for name, weight in weights.items():
        difference = adapter.difference(weight.stored_rows(name, change), columns, weight.value.device)
        updated[name] = difference.mul_(adapter.scale).add_(weight.value)
    ratios = dict.fromkeys(weights, Scales())
    if adapter.scales_rows:
        for name, weight in weights.items():
            magnitudes = adapter.magnitudes(weight.stored_rows(name, change), columns, weight.value.device)
            ratios[name] = Scales(rows=magnitudes / (weight.value.norm(dim=1) + EPSILON))
    elif adapter.needs_the_whole:
        norm = torch.stack([value.norm(dim=0) for value in updated.values()]).norm(dim=0)
        magnitudes = adapter.magnitudes((), columns, norm.device)
        ratios = dict.fromkeys(weights, Scales(columns=magnitudes / (norm + EPSILON)))
    for name, weight in weights.items():
        weight.add(change, updated.pop(name), ratios[name])


def with_magnitudes(
    changes: Sequence[LoraChange],
    shard: MatrixShard,
    scales: WeightScales,
    device: torch.device,
    dtype: torch.dtype,
) -> HeldProducts:
    """Return changes of a weight, some of which have magnitudes, with their factors in them."""
    last = first_unscaled([change.adapter for change in changes])
    adapters: dict[Hashable, AddedProduct] = {}
    for change in changes[:last]:
        where = shard.stored_rows(change)
        rows, columns = scales[change.order]
        if is_kronecker(change.adapter):
            bare = change.adapter.kronecker(where, shard.columns, device, dtype)
            made = replace(bare, strength=change.strength, row_scale=rows, column_scale=columns)
        else:
            up, down = low_rank(change, where, shard.columns, device)
            up, down = used(Scales(rows=rows).of(up), Scales(columns=columns).of(down))
            made = LowRank(up.to(dtype), down.to(dtype), strength=change.strength)
        adapters[change.scaled_key] = made
    rest = plain(changes[last:], shard, device, dtype, {})
    return HeldProducts(adapters | rest.adapters, *scales[None])


def _product(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    if one is None or two is None:
        return two if one is None else one
    return one * two


def _cut(factors: Tensor | None, spans: Spans | None) -> Tensor | None:
    return None if factors is None else cut(factors.unsqueeze(1), spans, None).flatten()
