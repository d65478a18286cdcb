"""The weights that each rank holds: as their files store them where layers keep them so, else in a dtype."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..loading.checkpoint import Checkpoint
from ..loading.parameter_sources import Source, packed_sizes
from ..loading.safetensors_files import StoredSize, Weights
from ..loading.weight_loading import keeps_packed
from ..parallel.fsdp import PREFETCH
from ..parallel.matrix_cuts import Shard
from ..parallel.sequence import Span
from ..quantization.kernels import Choice


@dataclass(frozen=True)
class HeldParameter:
    """A parameter as a rank holds it, if it is on this rank's stage.

    block: where it is in the order of blocks; None outside of them. sizes: of its tensors, several where it
    is quantized. unpacked: bytes of the weight that a quantized one stands for, of ``dtype``, where that is
    dequantized to be multiplied; else 0.
    """

    module: str
    block: int | None
    sizes: list[StoredSize]
    dtype: torch.dtype
    unpacked: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all its tensors, not sharded."""
        return sum(size.bytes for size in self.sizes)

    def shard(self, rank: int, ranks: int) -> int:
        """Count the bytes of the ``rank``-th of FSDP's shards, along the first dimension."""
        return sum(_chunk(size.length, rank, ranks) * (size.bytes // size.length) for size in self.sizes)


@dataclass(frozen=True)
class HeldWeights:
    """Bytes of a rank's weights: on the ``device``, waiting on the ``host``; ``scratch``: where quantized
    ones are dequantized, one at a time; ``gathered``: whole weights while a block runs under FSDP."""

    device: int
    host: int
    scratch: int
    gathered: int


@dataclass(frozen=True)
class Whole:
    """A parameter of a checkpoint. block: where it is in the order of blocks; layer: the class of the module
    that has it; key: in the files."""

    module: str
    block: int | None
    layer: type[nn.Module]
    is_weight: bool
    is_float32: bool
    shape: tuple[int, ...]
    source: Source
    key: str


def _whole(checkpoint: Checkpoint, name: str) -> Whole:
    module, _, leaf = name.rpartition(".")
    block, layer = checkpoint.parameters[name]
    source = checkpoint.sources[name]
    return Whole(
        module,
        block,
        layer,
        is_weight=leaf == "weight",
        is_float32=checkpoint.family.build.is_float32(name),
        shape=checkpoint.shapes[name],
        source=source,
        key=checkpoint.key(source),
    )


def held_parameters(
    checkpoint: Checkpoint,
    cuts: Sequence[Mapping[str, Shard]],
    dtype: torch.dtype,
    choices: Mapping[str, Choice],
    bits: int = 0,
) -> list[list[HeldParameter]]:
    """Return every parameter as ranks with each of these ``cuts`` load it; plain ones in ``dtype``, or
    float32 where the family keeps it. ``choices``: how quantized ones multiply, by default by the dequantized
    weight. ``bits``: of a value of plain linear layers in blocks, if they were quantized."""
    found: list[list[HeldParameter]] = [[] for _ in cuts]
    for name in checkpoint.parameters:
        each = _whole(checkpoint, name)
        own_dtype = torch.float32 if each.is_float32 else dtype
        is_dequantized = name not in choices or choices[name].needs_scratch
        uncut = None  # most ranks hold most parameters alike
        for held, own in zip(found, cuts):
            cut = own.get(each.module)
            if cut is None and uncut is not None:
                held.append(uncut)
                continue
            held.append(_held(checkpoint.files, each, cut, own_dtype, is_dequantized, bits))
            if cut is None:
                uncut = held[-1]
    return found


def _held(
    files: Weights, each: Whole, cut: Shard | None, dtype: torch.dtype, is_dequantized: bool, bits: int
) -> HeldParameter:
    """A parameter, or what ``cut`` leaves of it."""
    kept = _shape(each.shape, cut)
    plain = kept.numel() * dtype.itemsize
    packed = None
    if each.is_weight and keeps_packed(each.layer, cut is not None):
        packed = packed_sizes(files, each.key, each.source, cut, each.shape[0])
    is_linear = each.is_weight and each.block is not None and issubclass(each.layer, nn.Linear)
    if packed is None and bits and is_linear:
        packed = [StoredSize(kept[0], plain * bits // (8 * dtype.itemsize))]
    if packed is None:
        return HeldParameter(each.module, each.block, [StoredSize(kept[0], plain)], dtype)
    return HeldParameter(each.module, each.block, packed, dtype, plain if is_dequantized else 0)


def _shape(whole: tuple[int, ...], cut: Shard | None) -> torch.Size:
    """The shape of what a rank holds of a parameter."""
    if cut is None:
        return torch.Size(whole)
    rows = sum(map(len, cut.outputs))
    return torch.Size([rows, sum(map(len, cut.inputs))] if len(whole) > 1 else [rows])


def _chunk(length: int, rank: int, ranks: int) -> int:
    """Count the rows of a chunk as torch.chunk cuts them, which FSDP shards by."""
    size = -(-length // ranks)
    return len(Span(min(rank * size, length), min((rank + 1) * size, length)))


def scratch_bytes(held: list[HeldParameter]) -> int:
    """Count the memory in which quantized weights are dequantized: the largest of each dtype."""
    largest: Counter[torch.dtype] = Counter()
    for parameter in held:
        largest[parameter.dtype] = max(largest[parameter.dtype], parameter.unpacked)
    return sum(largest.values())


def gathered_bytes(held: list[HeldParameter]) -> int:
    """Count the most that FSDP2 gathers at once: what is outside of blocks stays whole through a forward,
    beside the block that runs and those gathered ahead of their turn."""
    whole: Counter[int | None] = Counter()
    for parameter in held:
        whole[parameter.block] += parameter.bytes
    blocks = range(max((block for block in whole if block is not None), default=-1) + 1)
    together = (sum(whole[i] for i in range(first, first + 1 + PREFETCH)) for first in blocks)
    return whole[None] + max(together, default=0)
