"""Fills a transformer with the weights of a checkpoint that a rank keeps, block by block."""

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..parallel.block_cost import OUTSIDE
from ..parallel.matrix_cuts import Shard
from ..parallel.tensor_parallel import ShardedLinear
from ..quantization.formats import Quantization
from ..quantization.kernels import MatmulChoice
from ..quantization.matmul import Matrix, column_unit
from ..quantization.packed_weight import PackedWeight, QuantLinear
from ..runtime.callbacks import nothing

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

#: Layers whose matrices may stay quantized.
LINEAR = (nn.Linear, ShardedLinear)


@dataclass(frozen=True)
class CheckedLoad:
    """A checkpoint that ranks can load. dtype: of its weights; cuts: module -> the piece of its weight that
    this rank keeps; matrices: the parameters that stay quantized, in pieces."""

    checkpoint: "Checkpoint"
    dtype: torch.dtype
    cuts: Mapping[str, Shard]
    matrices: Mapping[str, Matrix]


def load(
    checkpoint: "Checkpoint",
    blocks: range,
    dtype: torch.dtype,
    device: torch.device,
    shards: Mapping[str, Shard] = {},
    held: Mapping[str, bool] = {},
    choices: Mapping[str, MatmulChoice] = {},
    on_progress: Callable[[int, int], None] = nothing,
    on_block: Callable[[str], None] = nothing,
) -> int:
    """Fill ``checkpoint.transformer`` with the weights of ``blocks`` and of shared layers; return the bytes
    read. It is a method of Checkpoint.

    Quantized matrices of linear layers stay as stored; the rest is of ``dtype``. ``shards``: module -> the
    piece of its weight that this rank keeps and reads. ``held``: modules that are loaded, or not, whichever
    block they are in. ``choices``: how quantized parameters multiply, else weight only. ``on_progress`` is
    given bytes loaded and in all; ``on_block`` a block's name when it is filled.
    """
    names = checkpoint.block_names
    absent = tuple(name + "." for i, name in enumerate(names) if i not in blocks)
    modules = {name: name.rpartition(".")[0] for name in checkpoint.sources}
    wanted = [name for name in modules if held.get(modules[name], not name.startswith(absent))]
    read_before = checkpoint.files.bytes_read
    counts = {name: math.prod(shape) for name, shape in checkpoint.shapes.items()}
    total = sum(counts[name] for name in wanted)
    value_bytes = checkpoint.files.size / max(1, sum(counts.values()))
    done = 0
    for buffer in checkpoint.transformer.buffers():
        if not buffer.is_meta:  # else it is read
            buffer.data = buffer.data.to(device)
    every = set(names)
    for block, group in groupby(wanted, lambda name: block_of(name, every)):
        for name in group:
            own_dtype = checkpoint.family.build.dtype_of(name, dtype)
            shard = shards.get(modules[name])
            _fill(checkpoint, name, own_dtype, device, shard, choices.get(name))
            done += counts[name]
            on_progress(round(done * value_bytes), round(total * value_bytes))
        if block is not None:
            on_block(block)
    return checkpoint.files.bytes_read - read_before


def block_of(name: str, blocks: Container[str]) -> str | None:
    """Return the one of ``blocks`` that a parameter is in."""
    parts = name.split(".")
    ends = (i + 1 for i, part in enumerate(parts) if part.isdigit())
    return next((block for block in (".".join(parts[:end]) for end in ends) if block in blocks), None)


def keeps_packed(layer: type[nn.Module], is_cut: bool = False) -> bool:
    """Return whether layers of a class keep their weight as stored where that is quantized. ``is_cut``: by
    tensor parallelism."""
    return layer in LINEAR or (is_cut and issubclass(layer, nn.Linear))


def matrices(
    checkpoint: "Checkpoint", shards: Mapping[str, Shard], dtype: torch.dtype = torch.bfloat16
) -> dict[str, Matrix]:
    """Return the parameters that stay quantized, from headers, cut over ranks as ``shards`` are; ``dtype``:
    in which the model computes."""
    of_parameter = {}
    for layer, quantization in _quantized_layers(checkpoint):
        if not keeps_packed(type(checkpoint.transformer.get_submodule(layer)), layer in shards):
            continue
        name = f"{layer}.weight"
        rows, columns = checkpoint.shapes[name]
        whole = Shard(outputs=(), inputs=(), heights=(rows,))
        shard = shards.get(layer, whole)
        own = checkpoint.family.build.dtype_of(name, dtype)
        edges = shard.edges or (0, columns)
        of_parameter[name] = Matrix(*quantization, rows=shard.heights, edges=edges, dtype=own)
    return of_parameter


def column_units(checkpoint: "Checkpoint") -> dict[str, int]:
    """Return linear layer -> neighbouring columns that must not be cut apart, where it is quantized."""
    return {layer: column_unit(*quantization) for layer, quantization in _quantized_layers(checkpoint)}


def _quantized_layers(checkpoint: "Checkpoint") -> Iterator[tuple[str, Quantization]]:
    """Yield the layers whose weights are quantized matrices, and how these are stored."""
    for name in checkpoint.sources:
        quantization = checkpoint.stored(name).quantization if name.endswith(".weight") else None
        if quantization is not None:
            yield name.removesuffix(".weight"), quantization


def _fill(
    checkpoint: "Checkpoint",
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None,
    choice: MatmulChoice | None,
):
    """Read a parameter or a stored table into its module."""
    where, _, leaf = name.rpartition(".")
    module = checkpoint.transformer.get_submodule(where)
    packed = None
    if leaf == "weight" and keeps_packed(type(module)):
        packed = checkpoint.stored(name).read_packed(device, shard)
    if packed is None:
        value = checkpoint.read(name, dtype, device, shard)
        is_buffer = leaf in dict(module.named_buffers(recurse=False))
        setattr(module, leaf, value if is_buffer else nn.Parameter(value, requires_grad=False))
        return
    weight = PackedWeight(packed, dtype, choice, checkpoint.layer_tokens.get(where, OUTSIDE).divided)
    if isinstance(module, ShardedLinear):
        del module.weight  # a parameter, whose place no module takes
        module.weight = weight
    elif isinstance(module, nn.Linear):
        checkpoint.transformer.set_submodule(where, QuantLinear(module, weight))
