"""Which rows and columns of each matrix a rank keeps under tensor parallelism (schemes: tensor_parallel.py).

A CutPlan is made once for a transformer, not for every rank. Cuts are even, but at two places they fall
between blocks of a quantized matrix, so that no rank keeps part of a block: where a rank takes its columns
out of whole activations (row, 2d), and in an MLP, whose first layers are cut as its last. Attention is cut
between heads, wherever blocks end: a head more would cost a rank more than the rest of a block.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

from torch import nn

from ..errors import UnsupportedError
from ..models.family import Family
from ..models.patterns import first_match, matches
from .mesh import Axis, Mesh
from .sequence import Span

#: What attention modules call the layers of queries and keys, and the numbers of heads, of queries first.
QUERIES = ("to_q", "to_query")
KEYS = ("to_k", "to_key")
HEAD_COUNTS = ("heads", "num_heads", "kv_heads", "num_kv_heads")
#: Scheme -> the mesh axes that cut inputs and outputs of every layer.
CUT_AXES = {"row": ("tp", ""), "column": ("", "tp"), "2d": ("tp_inputs", "tp_outputs")}


@dataclass(frozen=True)
class Shard:
    """The piece of one weight (out, in) on this rank, and the collectives of its layer.

    outputs, inputs: spans of rows and columns held here; a norm has no inputs. take_input: the layer is given
    whole activations. reduce: ranks over which outputs (a norm: means) are summed. gather: ranks whose
    outputs are concatenated. edges: columns where any rank's inputs begin or end. heights: how many rows each
    of the ranks holds that the rows are cut over.
    """

    outputs: tuple[Span, ...]
    inputs: tuple[Span, ...]
    take_input: bool = False
    reduce: Axis | None = None
    gather: Axis | None = None
    edges: tuple[int, ...] = ()
    heights: tuple[int, ...] = ()

    @property
    def features(self) -> int:
        """Features of the layer's output on this rank."""
        return sum(self.heights) if self.gather else sum(map(len, self.outputs))

    @property
    def reduced_features(self) -> int:
        """Numbers of a token that are summed over ``reduce``."""
        return sum(map(len, self.outputs)) if self.inputs else 1


@dataclass(frozen=True)
class Runs:
    """Neighbouring runs of features, such as queries, keys and values in one matrix, each cut by itself.

    widths: features of each run. over: the mesh axis whose ranks share each run; "" for none. units: a run is
    cut at multiples of its unit; () for 1.
    """

    widths: tuple[int, ...]
    over: str = ""
    units: tuple[int, ...] = ()

    def spans(self, axis: Axis | None) -> tuple[Span, ...]:
        """Return this rank's span of each run, in the order of the runs; the whole runs without ``axis``."""
        starts = accumulate(self.widths, initial=0)
        units = self.units or (1,) * len(self.widths)
        return tuple(_piece(*run, axis) for run in zip(starts, self.widths, units))

    def sizes(self, axis: Axis) -> tuple[int, ...]:
        """Count the features that each rank of ``axis`` holds of all runs."""
        return tuple(sum(map(len, self.spans(replace(axis, rank=rank)))) for rank in range(axis.size))

    def edges(self, axis: Axis) -> tuple[int, ...]:
        """Return where any rank's shard of any run begins or ends."""
        every = (span for rank in range(axis.size) for span in self.spans(replace(axis, rank=rank)))
        return tuple(sorted({edge for span in every for edge in (span.lo, span.hi)}))


def _piece(start: int, width: int, unit: int, axis: Axis | None) -> Span:
    if axis is None:
        return Span(start, start + width)
    is_misaligned = start % unit and not axis.shares  # the parts of unequal shares are units of their width
    if is_misaligned or width % unit or width // unit < axis.size:  # fewer blocks than ranks
        unit = 1
    part = Span(0, width // unit).shard(axis.rank, axis.size, axis.shares)
    return Span(start + part.lo * unit, start + part.hi * unit)


@dataclass(frozen=True)
class Cut:
    """How a matrix is cut; a norm has no columns. exchanges: ranks are given and return whole activations."""

    rows: Runs
    columns: Runs
    exchanges: bool = False

    def shard(self, mesh: Mesh) -> Shard:
        """Return this rank's piece of the weight on ``mesh``, and the collectives of its layer."""
        rows_axis: Axis | None = getattr(mesh, self.rows.over) if self.rows.over else None
        columns_axis: Axis | None = getattr(mesh, self.columns.over) if self.columns.over else None
        outputs = self.rows.spans(rows_axis)
        heights = self.rows.sizes(rows_axis) if rows_axis else (sum(self.rows.widths),)
        if not self.columns.widths:
            return Shard(outputs, (), reduce=rows_axis, heights=heights)
        gathered = rows_axis if self.exchanges else None
        return Shard(
            outputs=outputs,
            inputs=self.columns.spans(columns_axis),
            take_input=self.exchanges and columns_axis is not None,
            reduce=columns_axis,
            gather=gathered,
            edges=self.columns.edges(columns_axis) if columns_axis else (),
            heights=heights,
        )


@dataclass(frozen=True)
class CutPlan:
    """Module -> how it is cut, of every layer that a scheme cuts."""

    cuts: Mapping[str, Cut]

    def shards(self, mesh: Mesh) -> dict[str, Shard]:
        """Return module -> the piece of the rank whose place is ``mesh``: one for all layers cut alike."""
        piece = cache(partial(Cut.shard, mesh=mesh))
        return {name: piece(cut) for name, cut in self.cuts.items()}


def cut_plan(
    transformer: nn.Module,
    family: Family,
    scheme: str,
    ranks: int,
    units: Mapping[str, int] | None = None,
    uneven: bool = False,
) -> CutPlan:
    """Plan how ``scheme`` cuts every layer of the blocks over ``ranks``; megatron by the family's plan, else
    diffusers' _tp_plan. ``units``: module -> neighbouring columns of a quantized matrix that stay together.
    ``uneven``: ranks have different shares, of whole heads. Raises UnsupportedError where it does not fit."""
    units = units or {}
    inside = tuple(f"{blocks}." for blocks in family.blocks.lists)
    layers = {name: module for name, module in transformer.named_modules() if name.startswith(inside)}
    if scheme != "megatron":
        linear = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
        return CutPlan({name: _whole(layer, scheme, units.get(name, 1)) for name, layer in linear.items()})
    styles: Any = family.tensor_plan or transformer._tp_plan
    if not styles:
        raise UnsupportedError(
            f"{type(transformer).__name__} has no plan for split_scheme megatron; set split_scheme to row, "
            f"column or 2d."
        )
    groups = _check_heads(layers, ranks, uneven)
    cuts = {}
    for name, layer in layers.items():
        cut = _megatron(layers, name, first_match(name, styles, None))
        if cut is None and isinstance(layer, nn.Linear) and _is_modulation(name, family):
            cut = _whole(layer, "column", 1)
        if cut is not None:
            cuts[name] = cut
    return CutPlan(_between_blocks(layers, cuts, family, units, groups if uneven else 0))


def _is_modulation(name: str, family: Family) -> bool:
    return matches(name.removeprefix(f"{_block(name, family)}."), family.cache.modulation)


def _block(name: str, family: Family) -> str:
    lists = next(blocks for blocks in family.blocks.lists if name.startswith(f"{blocks}."))
    return f"{lists}.{name.removeprefix(f'{lists}.').partition('.')[0]}"


def head_groups(modules: Iterable[nn.Module]) -> int:
    """Count the groups of heads that ranks can have whole: the heads' greatest common divisor; 0 for none."""
    return math.gcd(*(count for module in modules for count in _head_counts(module)))


def has_layer(module: nn.Module, names: Iterable[str]) -> bool:
    """Return whether ``module`` has a child of one of these names."""
    # most modules are layers themselves, which take long to say that they lack a name
    is_layer = next(module.children(), None) is None
    return not is_layer and any(hasattr(module, name) for name in names)


def features_of(module: nn.Module, names: Iterable[str]) -> int:
    """Return the features of the layer of a module that has the first of these ``names``; 0 without one."""
    return next((getattr(module, name).out_features for name in names if hasattr(module, name)), 0)


def _head_counts(attention: nn.Module) -> list[int]:
    """Count the heads of an attention module: of queries, as it says, and of keys, by their width too."""
    if not has_layer(attention, QUERIES):
        return []
    queries = features_of(attention, QUERIES)
    keys = features_of(attention, KEYS)
    counts = [getattr(attention, key, None) for key in HEAD_COUNTS]
    known = [count for count in counts if isinstance(count, int)]
    return [*known, keys * known[0] // queries] if known and keys else known


def _check_heads(layers: Mapping[str, nn.Module], ranks: int, uneven: bool) -> int:
    """Return head_groups. Raises UnsupportedError where they do not go round."""
    groups = head_groups(layers.values())
    if uneven and groups < ranks:
        raise UnsupportedError(
            f"tensor_parallel_degree is {ranks}, but the attention heads divide into {groups} groups of "
            f"queries with their keys and values; use at most {groups} ranks, or split_scheme row, column "
            f"or 2d."
        )
    for name, module in layers.items():
        if uneven or not has_layer(module, QUERIES):
            continue
        for kind in HEAD_COUNTS:
            count = getattr(module, kind, None)
            if isinstance(count, int) and count % ranks:
                raise UnsupportedError(
                    f"tensor_parallel_degree is {ranks}, which does not divide the {count} heads "
                    f"({kind}) of {name}; use a divisor of {count}, or split_scheme row, column or 2d."
                )
    return groups


def _whole(linear: nn.Linear, scheme: str, unit: int) -> Cut:
    inputs, outputs = CUT_AXES[scheme]
    columns = Runs((linear.in_features,), inputs, (unit,))
    return Cut(Runs((linear.out_features,), outputs), columns, exchanges=True)


def _megatron(layers: Mapping[str, nn.Module], name: str, style) -> Cut | None:
    """Return how a layer of that style is cut; None where it is not."""
    layer = layers[name]
    if style == "norm":
        return _norm(layer, layers[name.rpartition(".")[0]], name)
    if not style or not isinstance(layer, nn.Linear):
        return None
    inputs, outputs = layer.in_features, layer.out_features
    match style:
        case "colwise":
            widths = [outputs]
        case "gated colwise":
            widths = [outputs // 2] * 2
        case "packed colwise":
            widths = vars(layer)["_tp_packed_col_blocks"]
        case "rowwise":
            widths = [inputs]
        case "rowwise after attention":
            widths = [outputs, inputs - outputs]
        case _:  # diffusers' packed rowwise style, an object
            widths = vars(layer)["_tp_packed_row_blocks"]
    if isinstance(style, str) and style.endswith("colwise"):
        return Cut(Runs(tuple(widths), "tp"), Runs((inputs,)))
    return Cut(Runs((outputs,)), Runs(tuple(widths), "tp"))


def _norm(norm: nn.Module, attention: nn.Module, name: str) -> Cut | None:
    """Cut a norm over all heads as its queries or keys; None for one of each head, which stays whole."""
    width = getattr(attention, "to_q" if name.endswith("q") else "to_k").out_features
    weight = getattr(norm, "weight", None)
    if weight is None or len(weight) != width:
        return None
    return Cut(Runs((width,), "tp"), Runs(()))


def _between_blocks(
    layers: Mapping[str, nn.Module],
    cuts: Mapping[str, Cut],
    family: Family,
    units: Mapping[str, int],
    groups: int,
) -> dict[str, Cut]:
    """Move cuts so that they divide no quantized block of an MLP and none of the ``groups`` of heads.

    All layers of an MLP are cut as its last one. They are found by their number of hidden features: those of
    one block of the transformer, outside of attention. groups: 0 where heads are shared evenly.
    """
    if not units and not groups:
        return dict(cuts)
    attentions = tuple(f"{name}." for name, module in layers.items() if has_layer(module, QUERIES))
    by_block = defaultdict(dict)
    for name, cut in cuts.items():
        if not cut.exchanges:
            by_block[_block(name, family)][name] = cut
    moved = dict(cuts)
    for own in by_block.values():
        fixed = set[int]()
        wanted: defaultdict[int, int] = defaultdict(lambda: 1)
        for name, cut in own.items():
            if cut.columns.over:
                for width in cut.columns.widths:
                    wanted[width] = math.lcm(wanted[width], units.get(name, 1))
            fixed |= _of_heads(cut, in_attention=name.startswith(attentions), uneven=groups > 0)
        sizes = {width: unit for width, unit in wanted.items() if unit > 1 and width not in fixed}
        if groups:
            sizes |= {width: width // groups for width in fixed if width % groups == 0}
        moved |= {name: _moved(cut, sizes) for name, cut in own.items()}
    return moved


def _of_heads(cut: Cut, in_attention: bool, uneven: bool) -> set[int]:
    """Return the widths of runs that are divided by heads: in a layer of attention and MLP at once, queries,
    keys and values (or what attention returns) come first."""
    runs = cut.columns if cut.columns.over else cut.rows
    if in_attention:
        return set(runs.widths)
    is_packed = len(runs.widths) > (1 if cut.columns.over else 2)  # two of rows are the halves of a gate
    if not is_packed:
        return set()
    return set(runs.widths if uneven else runs.widths[:1])  # models tell runs apart by the ratio of widths


def _moved(cut: Cut, sizes: Mapping[int, int]) -> Cut:
    """Cut the runs of these widths at multiples of their units."""

    def fitted(runs: Runs) -> Runs:
        return replace(runs, units=tuple(sizes.get(width, 1) for width in runs.widths)) if runs.over else runs

    return Cut(fitted(cut.rows), fitted(cut.columns))
