"""What magnitudes (DoRA, arXiv 2402.09353) make of changes next to a quantized weight: factors of its sides.

Magnitudes m of rows make w + s (m / |w| (w + d) - w) of a row w with the difference d (Adapter.applied_to).
That is c w + s m / |w| d with c = 1 + s (m / |w| - 1): what was there before is multiplied by c. Those of
columns do the same with columns, and |w + d| for |w|. So the stored weight and every change before stay
products of their own, with factors for their rows and their columns.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...parallel.matrix_cuts import Shard
from ...parallel.sequence import Span
from ...quantization.added_products import AddedProduct, Scales, scaled
from ..checkpoint import Checkpoint
from .adapters import Spans, cut
from .lora_file_bytes import matrix
from .lora_products import HeldProducts, LoraChange, MatrixShard, first_unscaled, past_last, plain, product_of

#: Added to norms, as in ComfyUI.
EPSILON = torch.finfo(torch.float32).eps
#: Most values of a weight that are followed at a time: 16 MB, of which there are up to six with a change
#: (tests/unit/test_lora_products.py), before a request has activations, as in lora_fusion.RUN_VALUES.
MAX_VALUES = 1 << 22


#: Factors of the stored weight (None) and of changes, by their order.
WeightScales = dict[int | None, Scales]


@dataclass
class FollowedWeight:
    """A weight as its ``changes`` make it one after the other, some rows at a time: as a whole in float32 it
    is several times what is stored, and a card may be nearly full.

    rows, columns: of the parameter ``name``, read to ``read_on``, computed on ``device``. column_ratios:
    magnitudes of columns / their norms, by the order of the change, as far as they are known.
    """

    name: str
    changes: list[LoraChange]
    checkpoint: Checkpoint
    read_on: torch.device
    device: torch.device
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    column_ratios: dict[int, Tensor] = field(default_factory=dict)

    def chunks(self) -> Iterator[Span]:
        """Cut the rows so that each chunk has few values; where there are none, one chunk is empty."""
        step = max(1, MAX_VALUES // max(1, sum(map(len, self.columns))))
        for span in [each for each in self.rows if len(each)] or self.rows[:1]:
            for lo in range(span.lo, max(span.hi, span.lo + 1), step):
                yield Span(lo, min(lo + step, span.hi))

    def states(self, chunk: Span, last: LoraChange) -> Iterator[tuple[LoraChange, Tensor, Tensor | None]]:
        """Yield each change up to ``last``, the rows of a chunk before it, and where it has magnitudes of
        rows, those / their norms. Column ratios before ``last`` are known."""
        shard = Shard((chunk,), self.columns)
        stored = self.checkpoint.read(self.name, torch.float32, self.read_on, shard)
        value = stored.to(self.device, copy=True)  # it may be the file's own memory
        del stored
        for change in self.changes:
            ratio = None
            if change.adapter.scales_rows:
                magnitudes = change.adapter.magnitudes(self._stored(chunk, change), (), self.device)
                ratio = magnitudes / (value.norm(dim=1) + EPSILON)
            yield change, value, ratio
            if change is last:
                return
            scales = Scales(ratio, self.column_ratios.get(change.order))
            value.lerp_(scaled(self.updated(change, chunk, value), *scales), change.use.strength)

    def updated(self, change: LoraChange, chunk: Span, value: Tensor) -> Tensor:
        """Return rows with the whole difference of a change, before magnitudes."""
        adapter = change.adapter
        difference = adapter.difference(self._stored(chunk, change), self.columns, self.device)
        return torch.add(value, difference, alpha=adapter.scale)

    def _stored(self, chunk: Span, change: LoraChange) -> list[Span]:
        """Return where rows are in the tensor that is changed."""
        return change.target.pieces[self.name].rows((chunk,), self.checkpoint.shapes[self.name][0])

    def column_norms(self, change: LoraChange) -> Tensor:
        """Compute the norms of the columns with the whole difference of a change."""
        norms = torch.zeros(sum(map(len, self.columns)), device=self.device)
        for chunk in self.chunks():
            for each, value, _ in self.states(chunk, change):
                if each is change:
                    norms = torch.hypot(norms, self.updated(change, chunk, value).norm(dim=0))
        return norms

    def row_ratios(self) -> dict[int, Tensor]:
        """Compute magnitudes of rows / their norms, by the order of the change."""
        found = defaultdict(list)
        last = past_last(each.adapter.scales_rows for each in self.changes)
        for chunk in self.chunks() if last else ():
            for change, _, ratio in self.states(chunk, self.changes[last - 1]):
                if ratio is not None:
                    found[change.order].append(ratio)
        return {order: torch.cat(ratios) for order, ratios in found.items()}

    def scales(self) -> WeightScales:
        """Return the factors of what is stored and of each change, once all column ratios are known."""
        row_ratios = self.row_ratios()
        found: WeightScales = {None: Scales()}
        for change in self.changes:
            ratio = Scales(row_ratios.get(change.order), self.column_ratios.get(change.order))
            of_earlier = [None if each is None else 1 + change.use.strength * (each - 1) for each in ratio]
            found = {order: Scales(*map(_product, each, of_earlier)) for order, each in found.items()}
            found[change.order] = ratio
        return found


def weight_scales(
    changes: Sequence[LoraChange],
    spans: Mapping[str, tuple[tuple[Span, ...], tuple[Span, ...]]],
    checkpoint: Checkpoint,
    read_on: torch.device,
    device: torch.device,
) -> dict[str, WeightScales]:
    """Compute the factors of weights that depend on each other, for the ``spans`` of each.

    changes: of all of them, in order, some with magnitudes. Norms are over whole rows, or over whole columns
    of all weights of a change: values are read whichever rank holds them, once for each magnitudes of columns
    and once for all of rows.
    """
    changes = changes[: first_unscaled(change.adapter for change in changes)]
    scale_rows = [each.adapter.scales_rows for each in changes if each.adapter.needs_the_whole]
    all_rows = not all(scale_rows)
    all_columns = any(scale_rows) or len({tuple(columns) for _, columns in spans.values()}) > 1
    followed = {}
    for name, (rows, columns) in spans.items():
        height, width = matrix(checkpoint.shapes[name])
        own_changes = [change for change in changes if name in change.target.pieces]
        own_rows = (Span(0, height),) if all_rows else rows
        own_columns = (Span(0, width),) if all_columns else columns
        place = (checkpoint, read_on, device)
        followed[name] = FollowedWeight(name, own_changes, *place, own_rows, own_columns)
    for change in changes:
        if change.adapter.scales_columns:
            _follow_columns(change, [followed[name] for name in change.target.pieces if name in followed])
    found = {}
    for name, (rows, columns) in spans.items():
        own = rows if all_rows else None, columns if all_columns else None
        own_scales = followed[name].scales()
        found[name] = {order: Scales(*map(_cut, each, own)) for order, each in own_scales.items()}
    return found


def _follow_columns(change: LoraChange, weights: Sequence[FollowedWeight]):
    """Have the column ratios of a change known to the ``weights`` that it is for."""
    norm = torch.stack([weight.column_norms(change) for weight in weights]).norm(dim=0)
    ratio = change.adapter.magnitudes((), weights[0].columns, norm.device) / (norm + EPSILON)
    for weight in weights:
        weight.column_ratios[change.order] = ratio


def with_magnitudes(
    changes: Sequence[LoraChange],
    shard: MatrixShard,
    scales: WeightScales,
    device: torch.device,
    dtype: torch.dtype,
) -> HeldProducts:
    """Return changes of a weight, some of which have magnitudes, with their factors in them."""
    last = first_unscaled(change.adapter for change in changes)
    scales = {order: each.map(lambda factors: factors.to(device)) for order, each in scales.items()}
    adapters: dict[Hashable, AddedProduct] = {}
    for change in changes[:last]:
        adapters[change.scaled_key] = product_of(change, shard, device, dtype, scales[change.order])
    rest = plain(changes[last:], shard, device, dtype, {})
    return HeldProducts(adapters | rest.adapters, scales[None])


def _product(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    if one is None or two is None:
        return two if one is None else one
    return one * two


def _cut(factors: Tensor | None, spans: Spans | None) -> Tensor | None:
    return None if factors is None else cut(factors.unsqueeze(1), spans, None).flatten()
