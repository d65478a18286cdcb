"""Tensor parallelism: matrices of the blocks cut over ranks, each rank reading and holding its piece alone.

Schemes (ParallelConfig.split_scheme):
- megatron: column then row through attention and MLP (Shoeybi et al., arXiv 1909.08053); heads and MLP units
  are divided, one all-reduce a pair. Styles of a plan: "colwise", "gated colwise" (two halves of outputs that
  are multiplied), "packed colwise" (several runs of outputs, which diffusers' layer names), "rowwise",
  "rowwise after attention" (inputs are attention's and the MLP's), "norm" (cut if it is over all heads).
  Modulation is cut by its outputs, which are gathered once an evaluation.
- row, column: every linear layer of a block by its inputs (all-reduce) or its outputs (all-gather).
- 2d: every layer by inputs and outputs over an r x c grid (arXiv 2104.05343 without the activations' split).
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..models.patterns import matches
from ..quantization import packed_weight
from ..quantization.kernels import MaxOverRanks
from ..runtime.opaque_ops import opaque
from . import comm
from .block_streams import blocks_of
from .matrix_cuts import HEAD_COUNTS, QUERIES, Shard, head_groups
from .mesh import Axis, Mesh
from .sequence import Span

#: The width of all heads, as attention modules call it.
ALL_HEADS = "inner_dim"

#: From so many tokens on, products that are summed over ranks are made in two halves: fewer multiply slower.
MIN_TOKENS_TO_HALVE = 2048


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

    def opaque_width(self) -> int:
        """Return the features of the layer's output on this rank."""
        return self.shard.features

    @opaque
    def forward(self, x: Tensor) -> Tensor:
        shard = self.shard
        if shard.take_input:
            x = x[..., shard.inputs[0].indices]
        if shard.reduce is None:
            out = packed_weight.linear(x, self.weight, self.bias)
        elif (
            packed_weight.can_multiply_in_chunks(self.weight) and x.shape[:-1].numel() >= MIN_TOKENS_TO_HALVE
        ):
            out = self._in_halves(x, shard.reduce)
        else:
            out = packed_weight.linear(x, self.weight, None, _max_over(shard.reduce))
            out = comm.all_reduce(out, shard.reduce, "tensor")
            out = out if self.bias is None else out + self.bias  # once, after the sum
        if shard.gather is None:
            return out
        shapes = [(*out.shape[:-1], width) for width in shard.heights]
        return torch.cat(comm.all_gather(out, shapes, shard.gather, "tensor"), dim=-1)

    def _in_halves(self, x: Tensor, axis: Axis) -> Tensor:
        """Multiply and sum over ranks in two halves of tokens: one is summed while the other multiplies."""
        rows = x.reshape(-1, x.shape[-1])
        own = rows.new_empty(len(rows), self.weight.shape[0])
        multiply = packed_weight.multiplier(self.weight, rows, _max_over(axis))
        middle = -(-len(rows) // 2)
        halves = slice(0, middle), slice(middle, len(rows))
        ends = []
        for half in halves:
            multiply(half, own[half])
            ends.append(comm.begin_all_reduce(own[half], axis, "tensor"))
        for end, half in zip(ends, halves):
            end()
            if self.bias is not None:
                own[half].add_(self.bias)  # once, after the sum
        return own.view(*x.shape[:-1], own.shape[1])


def _max_over(axis: Axis) -> MaxOverRanks:
    """Return what compares largest values over the ranks that hold other columns."""
    return partial(comm.all_reduce_max, axis=axis, mechanism="tensor")


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

    @opaque
    def forward(self, x: Tensor) -> Tensor:
        assert self.shard.reduce is not None, "a norm is cut over the heads of several ranks"
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square()
        squares = comm.all_reduce(squares, self.shard.reduce, "tensor")
        normed = x * torch.rsqrt(squares / self.features + self.eps)  # in float32
        return torch.mul(normed, self.weight, out=torch.empty_like(x))


class FirstChoice(nn.Module):
    """A router's hook: all ranks of ``tp`` use the first one's choice of experts. With another last bit a GPU
    may choose another one: ranks would sum parts of different experts, of different sizes."""

    def __init__(self, tp: Axis):
        super().__init__()
        self.tp = tp

    def forward(self, router: nn.Module, args: tuple, output: tuple) -> tuple:
        return tuple(each if each is None else comm.broadcast(each, (self.tp,)) for each in output)


def apply(transformer: nn.Module, shards: Mapping[str, Shard], family, scheme: str, tp: Axis):
    """Replace every layer in ``shards`` by its sharded module, and set the heads that attention has left."""
    blocks = blocks_of(transformer, family)
    groups = head_groups(module for block in blocks for module in block.modules())
    for name, shard in shards.items():
        whole = transformer.get_submodule(name)
        is_linear = isinstance(whole, nn.Linear)
        sharded = ShardedLinear(whole, shard) if is_linear else ShardedNorm(whole, shard)
        transformer.set_submodule(name, sharded)
    modules = (named for block in blocks for named in block.named_modules())
    for router in [module for name, module in modules if matches(name, family.blocks.routers)]:
        router.add_module("first_choice", choice := FirstChoice(tp))  # where regroup finds it
        router.register_forward_hook(choice)
    if scheme != "megatron":
        return
    mine = Span(0, groups).shard(tp.rank, tp.size, tp.shares)
    for module in transformer.modules():
        if any(isinstance(getattr(module, name, None), ShardedLinear) for name in QUERIES):
            for count in (*HEAD_COUNTS, ALL_HEADS):
                if isinstance(getattr(module, count, None), int):
                    setattr(module, count, getattr(module, count) * len(mine) // groups)
    for block in blocks if family.blocks.per_feature else ():
        signature = inspect.signature(block.forward)
        names = family.blocks.per_feature
        own = partial(_own_features, signature=signature, names=names, mine=mine, groups=groups)
        block.register_forward_pre_hook(own, with_kwargs=True)


def regroup(transformer: nn.Module, old: Mesh, new: Mesh):
    """Have the sharded layers communicate over the groups of ``new``; their weights are those of ``old``."""
    axes = {id(getattr(old, name)): getattr(new, name) for name in ("tp", "tp_inputs", "tp_outputs")}
    for module in transformer.modules():
        if isinstance(module, (ShardedLinear, ShardedNorm)):
            reduce = axes.get(id(module.shard.reduce))
            gather = axes.get(id(module.shard.gather))
            module.shard = replace(module.shard, reduce=reduce, gather=gather)
        elif isinstance(module, FirstChoice):
            module.tp = new.tp


def _own_features(block, args, kwargs, signature, names, mine: Span, groups: int):
    """Cut those arguments of a block that run over the features of all heads, of which this rank has the
    groups ``mine``: tensors, or tuples of them."""
    bound = signature.bind(*args, **kwargs)
    for name in names:
        whole = bound.arguments[name]
        cut = [_own_heads(x, mine, groups) for x in (whole if isinstance(whole, tuple) else (whole,))]
        bound.arguments[name] = tuple(cut) if isinstance(whole, tuple) else cut[0]
    return bound.args, bound.kwargs


def _own_heads(x: Tensor, mine: Span, groups: int) -> Tensor:
    """Return this rank's shard of (B, tokens, features of all heads) or (B, heads, tokens, features)."""
    dim = 1 if x.ndim == 4 else -1
    size = x.shape[dim] // groups
    return x.narrow(dim, mine.lo * size, len(mine) * size)
