"""Tensor parallelism: matrices of the blocks cut over ranks, each rank reading and holding its piece alone.

Schemes (ParallelConfig.split_scheme):
- megatron: column then row through attention and MLP (Shoeybi et al., arXiv 1909.08053); heads and MLP units
  are divided, one all-reduce a pair. Styles of a plan: "colwise", "gated colwise" (two halves of outputs that
  are multiplied), "packed colwise" (several runs of outputs, which diffusers' layer names), "rowwise",
  "rowwise after attention" (inputs are attention's and the MLP's), "norm" (cut if it is over all heads).
  Modulation is cut by its outputs, which are gathered once an evaluation.
- row, column: every linear layer of a block by its inputs (all-reduce) or its outputs (all-gather).
- 2d: every layer by inputs and outputs at once over an r x c grid of the ranks (SUMMA-like, arXiv 2104.05343
  without the activations' split).
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..quantization import packed_weight
from . import comm
from .block_streams import block_list
from .mesh import Axis, Mesh
from .sequence import Span

#: What attention modules call the layer of queries, the numbers of heads, and the width of all heads.
QUERIES = ("to_q", "to_query")
HEAD_COUNTS = ("heads", "num_heads", "kv_heads", "num_kv_heads")
ALL_HEADS = "inner_dim"


@dataclass(frozen=True)
class Shard:
    """The piece of one weight (out, in) on this rank, and the collectives of its layer.

    outputs, inputs: spans of rows and columns held here; a norm has no inputs. take_input: the layer is given
    whole activations. reduce: ranks over which outputs (a norm: means) are summed. gather: ranks whose
    outputs are concatenated, of ``widths[i]`` features. edges: columns where any rank's inputs begin or end.
    """

    outputs: tuple[Span, ...]
    inputs: tuple[Span, ...]
    take_input: bool = False
    reduce: Axis | None = None
    gather: Axis | None = None
    widths: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()

    @property
    def reduced_features(self) -> int:
        """Numbers of a token that are summed over ``reduce``."""
        return sum(map(len, self.outputs)) if self.inputs else 1


class ShardedLinear(nn.Module):
    """A linear layer of which this rank holds a piece, plain or quantized; parameter names stay those of
    nn.Linear."""

    weight: nn.Parameter | packed_weight.PackedWeight

    def __init__(self, linear: nn.Linear, shard: Shard):
        super().__init__()
        self.shard = shard
        rows = sum(map(len, shard.outputs))
        columns = sum(map(len, shard.inputs))
        self.weight = nn.Parameter(linear.weight.new_empty(rows, columns), requires_grad=False)
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.new_empty(rows), requires_grad=False)
        packed_weight.carry_hooks(linear, self)

    def forward(self, x: Tensor) -> Tensor:
        shard = self.shard
        if shard.take_input:
            x = x[..., shard.inputs[0].lo : shard.inputs[0].hi]
        if shard.reduce is None:
            out = packed_weight.linear(x, self.weight, self.bias)
        else:
            largest = partial(comm.all_reduce_max, axis=shard.reduce, mechanism="tensor")
            out = packed_weight.linear(x, self.weight, None, largest)
            out = comm.all_reduce(out, shard.reduce, "tensor")
            out = out if self.bias is None else out + self.bias  # once, after the sum
        if shard.gather is None:
            return out
        shapes = [(*out.shape[:-1], width) for width in shard.widths]
        return torch.cat(comm.all_gather(out, shapes, shard.gather, "tensor"), dim=-1)


class ShardedNorm(nn.Module):
    """RMS norm over the features of all heads, of which this rank holds some; squares add up in float32."""

    def __init__(self, norm: nn.Module, shard: Shard):
        super().__init__()
        whole = norm.weight
        assert isinstance(whole, Tensor), "norms without weights are not cut"
        self.shard = shard
        self.features = len(whole)
        self.eps: float = vars(norm)["eps"]
        self.weight = nn.Parameter(whole.new_empty(sum(map(len, shard.outputs))), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.shard.reduce is not None, "a norm is cut over the heads of several ranks"
        wide = x.float()
        squares = comm.all_reduce(wide.square().sum(dim=-1, keepdim=True), self.shard.reduce, "tensor")
        return (wide * torch.rsqrt(squares / self.features + self.eps) * self.weight).to(x.dtype)


def shards(transformer: nn.Module, family, scheme: str, mesh: Mesh) -> dict[str, Shard]:
    """Return module name -> Shard of every layer that ``scheme`` cuts; megatron by the family's plan, else
    diffusers' _tp_plan. Raises UnsupportedError if the scheme does not fit the transformer."""
    layers = {
        name: module
        for name, module in transformer.named_modules()
        if name.startswith(tuple(f"{blocks}." for blocks in family.blocks.lists))
    }
    if scheme != "megatron":
        return {
            name: _whole_activations(module, scheme, mesh)
            for name, module in layers.items()
            if isinstance(module, nn.Linear)
        }
    plan = family.tensor_plan or transformer._tp_plan
    if not plan:
        raise UnsupportedError(
            f"{type(transformer).__name__} has no plan for split_scheme megatron; set split_scheme to row, "
            f"column or 2d."
        )
    _check_heads(layers, mesh.tp.size)
    found = {name: _planned(layers, name, _style(plan, name), mesh.tp) for name in layers}
    for name, module in layers.items():
        if found[name] is None and isinstance(module, nn.Linear) and _is_modulation(name, family):
            found[name] = _whole_activations(module, "column", mesh)
    return {name: shard for name, shard in found.items() if shard is not None}


def _is_modulation(name: str, family) -> bool:
    """Is it a modulation layer of a block, whose weights are many and whose input is one embedding?"""
    lists = next(blocks for blocks in family.blocks.lists if name.startswith(f"{blocks}."))
    inner = name.removeprefix(f"{lists}.").partition(".")[2]
    return any(fnmatchcase(inner, pattern) for pattern in family.cache.modulation)


def _check_heads(layers, ranks):
    for name, module in layers.items():
        if not any(hasattr(module, query) for query in QUERIES):
            continue
        for count in (getattr(module, key, None) for key in HEAD_COUNTS):
            if isinstance(count, int) and count % ranks:
                raise UnsupportedError(
                    f"tensor_parallel_degree is {ranks}, which does not divide the {count} heads of keys "
                    f"and values in {name}; use a divisor of {count}, or split_scheme row, column or 2d."
                )


def _style(plan, name):
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def _whole_activations(linear: nn.Linear, scheme: str, mesh: Mesh) -> Shard:
    inputs, outputs = {
        "row": (mesh.tp, None),
        "column": (None, mesh.tp),
        "2d": (mesh.tp_inputs, mesh.tp_outputs),
    }[scheme]
    whole_in = Span(0, linear.in_features)
    whole_out = Span(0, linear.out_features)
    mine_in = whole_in.shard(inputs.rank, inputs.size) if inputs else whole_in
    mine_out = whole_out.shard(outputs.rank, outputs.size) if outputs else whole_out
    widths = tuple(len(whole_out.shard(i, outputs.size)) for i in range(outputs.size)) if outputs else ()
    edges = _edges([linear.in_features], inputs) if inputs else ()
    return Shard((mine_out,), (mine_in,), inputs is not None, inputs, outputs, widths, edges)


def _planned(layers: Mapping[str, nn.Module], name: str, style, tp: Axis) -> Shard | None:
    parent, _, leaf = name.rpartition(".")
    layer = layers[name]
    if style == "norm":
        return _norm(layer, layers[parent], leaf, tp)
    return _megatron(layer, style, tp) if style and isinstance(layer, nn.Linear) else None


def _megatron(layer: nn.Linear, style, tp: Axis) -> Shard:
    whole_in = Span(0, layer.in_features)
    whole_out = Span(0, layer.out_features)
    if style == "colwise":
        return Shard((whole_out.shard(tp.rank, tp.size),), (whole_in,))
    if style == "packed colwise":
        return Shard(_pieces(vars(layer)["_tp_packed_col_blocks"], tp), (whole_in,))
    if style == "gated colwise":
        return Shard(_pieces([layer.out_features // 2] * 2, tp), (whole_in,))
    packed = {
        "rowwise": [layer.in_features],
        "rowwise after attention": [layer.out_features, layer.in_features - layer.out_features],
    }
    # else diffusers' packed rowwise style
    widths = packed[style] if isinstance(style, str) else vars(layer)["_tp_packed_row_blocks"]
    return Shard((whole_out,), _pieces(widths, tp), reduce=tp, edges=_edges(widths, tp))


def _pieces(widths: list[int], tp: Axis) -> tuple[Span, ...]:
    """This rank's shard of each of several runs of features."""
    starts = accumulate(widths, initial=0)
    return tuple(Span(start, start + width).shard(tp.rank, tp.size) for start, width in zip(starts, widths))


def _edges(widths: list[int], axis: Axis) -> tuple[int, ...]:
    """Where any rank's shard of any of these runs of features begins or ends."""
    every = (span for rank in range(axis.size) for span in _pieces(widths, replace(axis, rank=rank)))
    return tuple(sorted({edge for span in every for edge in (span.lo, span.hi)}))


def _norm(norm: nn.Module, attention: nn.Module, leaf: str, tp: Axis) -> Shard | None:
    """The norm of each head by itself stays whole; one over all heads is cut as its queries or keys."""
    width = getattr(attention, "to_q" if leaf.endswith("q") else "to_k").out_features
    weight = getattr(norm, "weight", None)
    if weight is None or len(weight) != width:
        return None
    return Shard((Span(0, width).shard(tp.rank, tp.size),), (), reduce=tp)


def apply(transformer: nn.Module, found: Mapping[str, Shard], family, scheme: str, tp: Axis):
    """Replace every layer in ``found`` by its sharded module, and set the heads that attention has left."""
    for name, shard in found.items():
        whole = transformer.get_submodule(name)
        is_linear = isinstance(whole, nn.Linear)
        sharded = ShardedLinear(whole, shard) if is_linear else ShardedNorm(whole, shard)
        transformer.set_submodule(name, sharded)
    if scheme != "megatron":
        return
    for module in transformer.modules():
        if any(isinstance(getattr(module, name, None), ShardedLinear) for name in QUERIES):
            for count in (*HEAD_COUNTS, ALL_HEADS):
                if isinstance(getattr(module, count, None), int):
                    setattr(module, count, getattr(module, count) // tp.size)
    for name in family.blocks.lists if family.blocks.per_feature else ():
        for block in block_list(transformer, name):
            signature = inspect.signature(block.forward)
            own = partial(_own_features, signature=signature, names=family.blocks.per_feature, tp=tp)
            block.register_forward_pre_hook(own, with_kwargs=True)


def regroup(transformer: nn.Module, old: Mesh, new: Mesh):
    """Have the sharded layers communicate over the groups of ``new``; their weights are those of ``old``."""
    axes = {id(getattr(old, name)): getattr(new, name) for name in ("tp", "tp_inputs", "tp_outputs")}
    for module in transformer.modules():
        if isinstance(module, (ShardedLinear, ShardedNorm)):
            reduce = axes.get(id(module.shard.reduce))
            gather = axes.get(id(module.shard.gather))
            module.shard = replace(module.shard, reduce=reduce, gather=gather)


def _own_features(block, args, kwargs, signature, names, tp):
    """Cut those arguments of a block that run over the features of all heads: tensors, or tuples of them."""
    bound = signature.bind(*args, **kwargs)
    for name in names:
        whole = bound.arguments[name]
        cut = [_own_heads(x, tp) for x in (whole if isinstance(whole, tuple) else (whole,))]
        bound.arguments[name] = tuple(cut) if isinstance(whole, tuple) else cut[0]
    return bound.args, bound.kwargs


def _own_heads(x: Tensor, tp: Axis) -> Tensor:
    """This rank's shard of (B, tokens, features of all heads) or (B, heads, tokens, features)."""
    dim = 1 if x.ndim == 4 else -1
    mine = Span(0, x.shape[dim]).shard(tp.rank, tp.size)
    return x.narrow(dim, mine.lo, len(mine))
