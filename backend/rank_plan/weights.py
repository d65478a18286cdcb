"""The weights that each rank holds: as their files store them where layers keep them so, else in a dtype."""

from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import torch
from torch import nn

from ..config import ParallelConfig
from ..loading.checkpoint import Checkpoint
from ..loading.files.safetensors_files import StoredSize
from ..loading.weight_loading import keeps_packed
from ..parallel.fsdp import PREFETCH
from ..parallel.matrix_cuts import Shard
from ..parallel.mesh import Axis, Mesh, single, tp_rows
from ..quantization.formats import effort_of
from ..quantization.kernels import Kernel, MatmulChoice, chunk_bytes
from ..quantization.packed import rows_at_once
from ..shares import grid_shares

#: How a quantized weight multiplies where nothing else is known.
DEQUANTIZED = MatmulChoice(None, "")


def tensor_mesh(config: ParallelConfig, rank: int) -> Mesh:
    """Return the mesh of a rank of a tensor-parallel group, without the group."""
    tp = config.tensor_parallel_degree
    rows = tp_rows(tp)
    row, column = divmod(rank, tp // rows)
    uneven = config.shares_of("tp")
    of_rows, of_columns = grid_shares(uneven, rows)
    return replace(
        single(),
        tp=Axis(group=None, rank=rank, size=tp, ranks=(), shares=uneven),
        tp_inputs=Axis(group=None, rank=row, size=rows, ranks=(), shares=of_rows),
        tp_outputs=Axis(group=None, rank=column, size=tp // rows, ranks=(), shares=of_columns),
    )


@dataclass(frozen=True)
class HeldParameter:
    """A parameter as a rank holds it, if it is on this rank's stage.

    block: where it is in the order of blocks; None outside of them. sizes: of its tensors, several where it
    is quantized. unpacked: bytes of the weight that a quantized one stands for, of ``dtype``, where that is
    dequantized to be multiplied; moved: bytes that are read and written for that, by so many ``kernels``;
    made: the most that these hold between them; else 0. kernel: which multiplies a quantized one of this
    ``matrix`` natively; compared: bytes of an input value, where its columns are cut over ranks, else 0.
    """

    module: str
    block: int | None
    sizes: list[StoredSize]
    dtype: torch.dtype
    unpacked: int = 0
    moved: int = 0
    kernels: int = 0
    made: int = 0
    kernel: Kernel | None = None
    matrix: tuple[int, int] = (0, 0)
    compared: int = 0

    @cached_property
    def bytes(self) -> int:
        """Bytes of all its tensors, not sharded."""
        return sum(size.bytes for size in self.sizes)

    def shard(self, rank: int, ranks: int) -> int:
        """Count the bytes of the ``rank``-th of FSDP's shards, as torch.chunk cuts rows."""
        total = 0
        for size in self.sizes:
            chunk = -(-size.length // ranks)
            rows = max(0, min(chunk, size.length - rank * chunk))
            total += rows * (size.bytes // size.length)
        return total


@dataclass(frozen=True)
class HeldWeights:
    """Bytes of a rank's weights: on the ``device``, waiting on the ``host``; ``scratch``: where quantized
    ones are dequantized, one at a time, or multiplied some tokens at a time; ``gathered``: whole weights
    while a block runs under FSDP; ``sent``: what the rank sends for that in one forward; ``sent_ahead``: for
    modulation that is computed ahead, once."""

    device: int
    host: int
    scratch: int
    gathered: int = 0
    sent: int = 0
    sent_ahead: int = 0


def held_parameters(
    checkpoint: Checkpoint,
    cuts: Mapping[str, Shard],
    dtype: torch.dtype,
    choices: Mapping[str, MatmulChoice],
    bits: int = 0,
) -> list[HeldParameter]:
    """Return every parameter as a rank with these ``cuts`` loads it; plain ones in ``dtype``, or
    float32 where the family keeps it. ``choices``: how quantized ones multiply, by default by the dequantized
    weight. ``bits``: of a value of plain linear layers in blocks, if they were quantized."""
    return [
        _held(checkpoint, name, cuts, dtype, choices.get(name, DEQUANTIZED), bits)
        for name in checkpoint.parameters
    ]


def _held(
    checkpoint: Checkpoint,
    name: str,
    cuts: Mapping[str, Shard],
    dtype: torch.dtype,
    choice: MatmulChoice,
    bits: int,
) -> HeldParameter:
    """Return a parameter, or what is left of it where it is cut."""
    module, _, leaf = name.rpartition(".")
    block, layer = checkpoint.parameters[name]
    shape = checkpoint.shapes[name]
    stored = checkpoint.stored(name)
    cut = cuts.get(module)
    own_dtype = checkpoint.family.build.dtype_of(name, dtype)
    local_shape = _shape(shape, cut)
    plain = local_shape.numel() * own_dtype.itemsize
    packed = None
    if leaf == "weight" and keeps_packed(layer, cut is not None):
        packed = stored.packed_sizes(cut)
    if packed is None and bits and leaf == "weight" and block is not None and issubclass(layer, nn.Linear):
        packed = [StoredSize(local_shape[0], plain * bits // (8 * own_dtype.itemsize))]
    if packed is None:
        return HeldParameter(module, block, [StoredSize(local_shape[0], plain)], own_dtype)
    matrix = (local_shape[0], local_shape[1])
    compared = own_dtype.itemsize if cut is not None and cut.reduce is not None else 0
    held = HeldParameter(
        module, block, packed, own_dtype, kernel=choice.kernel, matrix=matrix, compared=compared
    )
    if not choice.needs_scratch:
        return held
    quantization = stored.quantization
    if quantization is None:  # of a file that is plain: what is stored, and what it stands for
        return replace(held, unpacked=plain, moved=plain + held.bytes)
    rows, columns = matrix
    effort = effort_of(quantization.format, quantization.settings, own_dtype)
    step = rows_at_once(quantization.format, columns)
    return replace(
        held,
        unpacked=plain,
        moved=round(rows * columns * effort.moved),
        kernels=-(-rows // step) * effort.kernels,
        made=round(min(rows, step) * columns * effort.made),
    )


def _shape(whole: tuple[int, ...], cut: Shard | None) -> torch.Size:
    if cut is None:
        return torch.Size(whole)
    rows = sum(map(len, cut.outputs))
    return torch.Size([rows, sum(map(len, cut.inputs))] if len(whole) > 1 else [rows])


def planned_scratch_bytes(held: list[HeldParameter], tokens: int) -> int:
    """Count the memory in which quantized weights are dequantized, the largest of each dtype, and what that
    or native products of ``tokens`` hold besides."""
    largest: Counter[torch.dtype] = Counter()
    for parameter in held:
        largest[parameter.dtype] = max(largest[parameter.dtype], parameter.unpacked)
    products = [
        chunk_bytes(each.kernel, tokens, *each.matrix, compared=each.compared) for each in held if each.kernel
    ]
    return sum(largest.values()) + max([*products, *(each.made for each in held)], default=0)


def gathered_bytes(held: list[HeldParameter], modulation: Container[str], is_ahead: bool) -> int:
    """Count the most that FSDP2 gathers at once, on GPUs: what is outside of blocks stays whole through a
    forward, besides the block that runs and those gathered ahead of their turn. The one that runs is there
    twice: FSDP2 keeps the buffer that its weights came in until the next one has its own, that of what is
    outside until the first one has, and that of the last block into the next forward. The layers of
    ``modulation`` come one at a time, before all blocks if it ``is_ahead``, else while their block runs.

    On the CPU it is a block too much: gathers are asynchronous there (fsdp.shard_rest), of which torch frees
    the buffer as soon as it is copied. Ranks on CPUs are planned as those on GPUs: a request is refused by
    half of it (need.request_need)."""
    apart: dict[int | None, Counter[str]] = defaultdict(Counter)
    whole: Counter[int | None] = Counter()
    for parameter in held:
        if parameter.module in modulation:
            apart[parameter.block][parameter.module] += parameter.bytes
        else:
            whole[parameter.block] += parameter.bytes
    blocks = range(max((block for block in whole if block is not None), default=-1) + 1)
    most = 0
    before = whole[None]
    if is_ahead:
        for size in chain.from_iterable(layers.values() for layers in apart.values()):
            most = max(most, 2 * size + before)
            before = size
    before = max(before, whole[len(blocks) - 1] if blocks else 0)
    for i in blocks:
        nested = 0 if is_ahead else 2 * max(apart[i].values(), default=0)
        following = sum(whole[j] for j in range(i + 1, i + 1 + PREFETCH))
        most = max(most, 2 * whole[i] + max(before, following) + nested)
        before = whole[i]
    return whole[None] + most


def sent_shards(held: list[HeldParameter], ranks: int) -> int:
    """Count what a rank sends to the others of ``ranks`` when FSDP2 gathers what is ``held`` once: its
    shards, as long as the first rank's."""
    return (ranks - 1) * sum(each.shard(0, ranks) for each in held)
