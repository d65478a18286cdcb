"""Tensor parallelism: matrices of the blocks cut over ranks, each rank reading and holding its piece alone.

Schemes (ParallelConfig.split_scheme):
- megatron: column then row through attention and MLP (Shoeybi et al., arXiv 1909.08053); heads and MLP units are divided, one all-reduce a pair.
- row, column: every linear layer of a block by its inputs (all-reduce) or its outputs (all-gather); activations stay whole.
- 2d: every layer by inputs and outputs at once over an r x c grid of the ranks (SUMMA-like, arXiv 2104.05343 without the activations' split).
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..mesh import Axis, Mesh
from . import comm
from .rows import Span


@dataclass(frozen=True)
class Shard:
    """The piece of one weight (out, in) on this rank and what its layer exchanges.

    outputs, inputs: spans of rows and columns kept. take_input: the layer is given whole activations and takes its columns of them.
    reduce: ranks over which outputs are summed. collect: ranks over which outputs are joined, each with ``widths[i]`` features.
    """

    outputs: tuple[Span, ...]
    inputs: tuple[Span, ...]
    take_input: bool = False
    reduce: Axis | None = None
    collect: Axis | None = None
    widths: tuple[int, ...] = ()


class ShardedLinear(nn.Module):
    """A linear layer of which this rank holds a piece; parameter names stay those of nn.Linear."""

    def __init__(self, linear: nn.Linear, shard: Shard):
        super().__init__()
        self.shard = shard
        rows, columns = sum(map(len, shard.outputs)), sum(map(len, shard.inputs))
        self.weight = nn.Parameter(linear.weight.new_empty(rows, columns), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.new_empty(rows), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        shard = self.shard
        if shard.take_input:
            x = x[..., shard.inputs[0].lo: shard.inputs[0].hi]
        if shard.reduce is None:
            out = F.linear(x, self.weight, self.bias)
        else:
            out = comm.reduce(F.linear(x, self.weight), shard.reduce, "tensor")
            out = out if self.bias is None else out + self.bias          # once, behind the sum
        if shard.collect is None:
            return out
        return torch.cat(comm.gather(out, [(*out.shape[:-1], width) for width in shard.widths], shard.collect, "tensor"), dim=-1)


def shards(transformer: nn.Module, block_lists: tuple[str, ...], plan: Mapping | None, scheme: str, mesh: Mesh) -> dict[str, Shard]:
    """Module name -> Shard of every linear layer that ``scheme`` cuts. ``plan``: module pattern -> "colwise", "rowwise" or a packed rowwise style
    (diffusers' _tp_plan). UnsupportedError where the scheme does not fit the transformer."""
    linears = {name: module for name, module in transformer.named_modules()
               if isinstance(module, nn.Linear) and name.split(".")[0] in block_lists}
    if scheme != "megatron":
        return {name: _whole_activations(module, scheme, mesh) for name, module in linears.items()}
    if not plan:
        raise UnsupportedError(f"{type(transformer).__name__} has no plan for split_scheme megatron; set split_scheme to row, column or 2d.")
    found = {name: _megatron(module, style, mesh.tp) for name, module in linears.items() if (style := _style(plan, name)) is not None}
    return found


def _style(plan, name):
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def _whole_activations(linear: nn.Linear, scheme: str, mesh: Mesh) -> Shard:
    inputs, outputs = {"row": (mesh.tp, None), "column": (None, mesh.tp), "2d": (mesh.tp_inputs, mesh.tp_outputs)}[scheme]
    whole_in, whole_out = Span(0, linear.in_features), Span(0, linear.out_features)
    mine_in = whole_in.shard(inputs.rank, inputs.size) if inputs else whole_in
    mine_out = whole_out.shard(outputs.rank, outputs.size) if outputs else whole_out
    widths = tuple(len(whole_out.shard(i, outputs.size)) for i in range(outputs.size)) if outputs else ()
    return Shard((mine_out,), (mine_in,), inputs is not None, inputs, outputs, widths)


def _megatron(linear: nn.Linear, style, tp: Axis) -> Shard:
    whole_in, whole_out = Span(0, linear.in_features), Span(0, linear.out_features)
    if style == "colwise":
        return Shard((whole_out.shard(tp.rank, tp.size),), (whole_in,))
    # packed: the input joins several tensors, each of which was cut by itself (Flux: attention output and MLP)
    blocks = [linear.in_features] if style == "rowwise" else linear._tp_packed_row_blocks
    spans, start = [], 0
    for width in blocks:
        spans.append(Span(start, start + width).shard(tp.rank, tp.size))
        start += width
    return Shard((whole_out,), tuple(spans), reduce=tp)


def apply(transformer: nn.Module, found: Mapping[str, Shard], scheme: str, tp: Axis):
    """Put ShardedLinear in the place of every layer in ``found`` and tell attention modules how many heads are left."""
    for name, shard in found.items():
        parent, leaf = transformer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        setattr(parent, leaf, ShardedLinear(getattr(parent, leaf), shard))
    if scheme == "megatron":
        for module in transformer.modules():
            if isinstance(getattr(module, "to_q", None), ShardedLinear):
                module.heads //= tp.size
