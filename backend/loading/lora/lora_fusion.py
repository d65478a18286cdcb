"""A rank's weights with LoRAs in them, made anew from the checkpoint: what is taken out leaves no bit."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import count
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from ...parallel import fsdp
from ...parallel.matrix_cuts import Shard
from ...parallel.sequence import Span
from ...quantization.added_products import LowRank
from ...quantization.lora_bytes import LoraBytes
from ...quantization.packed_weight import PackedWeight
from ...units import fine_gigabytes
from ..checkpoint import Checkpoint
from ..device_or_host import DeviceOrHost
from ..files.regular_files import file_state
from .adapters import cut
from .lora_file_bytes import matrix
from .lora_keys import Lora, LoraUse, open_lora
from .lora_products import LoraChange, MatrixShard, added_bytes, are_products, first_unscaled, plain
from .lora_targets import Targets
from .lora_validation import check_values
from .magnitudes import WeightScales, weight_scales, with_magnitudes

#: LoRAs in the order in which they are added.
Stack = tuple[LoraUse, ...]
#: What is in weights of which a change has failed: no stack that anybody asks for.
UNKNOWN: Stack = (LoraUse("", 0.0),)
#: Values of a sharded parameter that change at a time: 16 to 20 MB of a device, before a request has keys,
#: values and activations (Engine.prepare_sample). Plans count those, which are more.
RUN_VALUES = 1 << 20
#: LoRAs of a model that stay open with their keys sorted (0.1 s for Qwen-Image Lightning), or all of a longer
#: stack. Each holds a descriptor of its file.
OPENED = 8
#: Parameter -> its changes in order, on all ranks.
LoraChanges = Mapping[str, list[LoraChange]]


class FusedWeights:
    """The parameters that this rank holds of a loaded ``checkpoint``, with the LoRAs of ``stack`` in them.

    ``cuts``: module -> the piece of its weight that a tensor-parallel rank keeps. ``device``: where values
    are computed; what finds no room there is computed on ``read_on``, where the checkpoint was read to: the
    host for weights that are sharded after that. Quantized values are dequantized there again, for the same
    bits, but for the norms of DoRA, which are computed on ``device``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        cuts: Mapping[str, Shard],
        device: torch.device,
        read_on: torch.device | None = None,
    ):
        self.checkpoint = checkpoint
        self.cuts = cuts
        self.device = device
        self.read_on = read_on or device
        self.room = DeviceOrHost(device, self.read_on)
        # by module, which stays the same whatever is wrapped around it later
        self.packed = {
            name: weight
            for name, weight in checkpoint.transformer.named_modules()
            if isinstance(weight, PackedWeight)
        }
        self.owners = {
            name: (checkpoint.transformer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, parameter in checkpoint.transformer.named_parameters()
            if not parameter.is_meta and name.rpartition(".")[0] not in self.packed
        }
        shapes = {name: checkpoint.shapes[name] for name in checkpoint.parameters}
        self.targets = Targets(checkpoint.family.layout, shapes)
        self.stack: Stack = ()
        self._held: dict[str, Stack] = {}
        #: Quantized parameter -> key of a low-rank change -> rank of what is held of it, once it was.
        self._ranks: dict[str, dict[tuple, int]] = defaultdict(dict)
        #: (path, state of its file) -> the LoRA, the last one used last.
        self._opened: dict[tuple, Lora] = {}

    def open(self, stack: Stack) -> list[Lora]:
        """Open the LoRAs of a stack, reading headers of files that changed. Raises UnsupportedError."""
        loras = [self._open(use.path) for use in stack]
        for oldest in list(self._opened)[: -max(OPENED, len(stack))]:
            del self._opened[oldest]
        return loras

    def _open(self, path: str) -> Lora:
        key = path, file_state(Path(path))
        lora = self._opened.pop(key, None) or open_lora(path, self.targets, self.checkpoint.name)
        self._opened[key] = lora
        return lora

    def check(self, stack: Stack) -> list[str]:
        """Open the LoRAs and check every value that would be added. Return a warning for each, empty where it
        fits in full and costs little. Raises UnsupportedError."""
        loras = self.open(stack)
        for use, lora in zip(stack, loras):
            check_values(lora.path, use.strength, lora.adapters)
        return [f"{lora.warning} {cost}".strip() for lora, cost in zip(loras, self._costs(stack))]

    def _costs(self, stack: Stack) -> list[str]:
        """Say what each LoRA costs next to quantized weights; empty where that is little. A layer is held a
        second time, in its dtype, from the first LoRA whose changes are no products of small matrices."""
        names = [[] for _ in stack]
        for name, changes in self._changes(stack).items():
            if name in self.packed:
                first = next((each for each in changes if not are_products([each.adapter])), None)
                if first is not None:
                    names[first.lora].append(name)
        return [self._cost(Path(use.path).name, layers) for use, layers in zip(stack, names)]

    def _cost(self, file: str, names: list[str]) -> str:
        if not names:
            return ""
        size = sum(self.packed[name].shape.numel() * self.packed[name].dtype.itemsize for name in names)
        return (
            f"With the LoRA {file} changes are no products of small matrices in {len(names)} quantized "
            f"layers, which are held a second time for it, in {fine_gigabytes(size)} a rank."
        )

    @torch.inference_mode(False)  # parameters outlive the request that asks for them
    def fuse(self, stack: Stack):
        """Have the LoRAs of ``stack`` in the weights and no others, changing only the parameters that differ.
        Raises UnsupportedError.

        A parameter is what the checkpoint holds and what the LoRAs add, summed in float32 and rounded once to
        the parameter's dtype. Next to a quantized weight, which stays as it is, LoRAs are products of their
        own; with adapters of other kinds it is computed as a whole and held too.
        """
        if stack == self.stack:
            return
        self.room.is_full = False
        changes = self._changes(stack)
        held = [name for name in changes if name in self.owners or name in self.packed]
        wanted = {name: tuple(change.use for change in self._concerning(name, changes)) for name in held}
        changed = [name for name in {**self._held, **wanted} if self._held.get(name) != wanted.get(name)]
        of_tensor = defaultdict(list)
        for name in changed:
            of_tensor[self.targets.together[name].name].append(name)
        if changed:
            fsdp.reshard(self.checkpoint.transformer)
        try:
            for _, names in sorted(of_tensor.items()):  # the same order on all ranks, whatever they held
                self._put(names, changes)
        except BaseException:  # out of memory, a file that is gone: nothing is known of those that change
            self._forget(changed)
            raise
        self._held = wanted
        self.stack = stack

    def _forget(self, names: list[str]):
        """Have the next ``fuse`` make parameters again, and free what is next to quantized ones."""
        self.stack = UNKNOWN
        self._held |= dict.fromkeys(names, UNKNOWN)
        for weight in (self.packed[name] for name in names if name in self.packed):
            weight.set_adapters({})

    def adapter_bytes(self, stack: Stack, dtype: torch.dtype, quantized: Collection[str] = ()) -> LoraBytes:
        """Count the bytes that the LoRAs of ``stack`` take next to quantized weights, in ``dtype``: on this
        rank, or on one that holds the whole model, of which these parameters are ``quantized``."""
        cuts = {} if quantized else self.cuts
        quantized_names = quantized or self.packed
        # of UNKNOWN, no file's, the adapters next to quantized weights have gone
        changes_of = self._changes(stack) if quantized_names and stack != UNKNOWN else {}
        size = LoraBytes()
        for name, changes in changes_of.items():
            if name in quantized_names:
                shard = self._matrix_shard(name, cuts)
                size = size.and_of(added_bytes(changes, shard, dtype, self._ranks[name]))
        return size

    def held_adapter_bytes(self) -> int:
        """Count the bytes of LoRAs that are next to quantized weights now. No file is opened."""
        return sum(each.nbytes for weight in self.packed.values() for each in weight.added_tensors)

    def _changes(self, stack: Stack) -> LoraChanges:
        changes = defaultdict(list)
        order = count()
        for i, (use, lora) in enumerate(zip(stack, self.open(stack))):
            for target, adapter in lora.adapters if use.strength else ():
                change = LoraChange(next(order), i, use, target, adapter)
                for name in target.pieces:
                    changes[name].append(change)
        return dict(changes)

    def _concerning(self, name: str, changes: LoraChanges) -> list[LoraChange]:
        """Return all changes on which a parameter's value depends, in order."""
        mine = changes.get(name, [])
        if not any(change.adapter.needs_the_whole for change in mine):
            return mine
        concerning = {change for piece in self._dependent(name, changes) for change in changes.get(piece, ())}
        return sorted(concerning, key=attrgetter("order"))

    def _dependent(self, name: str, changes: LoraChanges) -> list[str]:
        """Return the parameters of one tensor of the single file or a LoRA: values may depend on them all."""
        names = list(self.targets.together[name].pieces)
        for each in names:  # which grows
            for change in changes.get(each, ()):
                names += [piece for piece in change.target.pieces if piece not in names]
        return names

    def _put(self, names: list[str], changes: LoraChanges):
        """Give parameters that the single file keeps in one tensor their values under ``changes``."""
        special = [name for name in names if self._needs_the_whole(name, changes.get(name, []))]
        wholes = self._wholes(special[0], changes) if special else {}
        scales: dict[str, WeightScales] = {}
        for name in names:
            if name in self.packed:
                self._set_adapters(name, changes, wholes, scales)
                continue
            parameter = getattr(*self.owners[name])
            own = [change.for_many_rows() for change in changes.get(name, [])]
            for rows in fsdp.own_runs(parameter, RUN_VALUES):
                value = self._rounded(name, own, wholes, parameter.dtype, rows)
                fsdp.assign(parameter, value, rows)

    def _needs_the_whole(self, name: str, changes: list[LoraChange]) -> bool:
        """Return whether a parameter's values depend on rows or columns that are other ranks'."""
        adapters = [change.adapter for change in changes]
        is_special = any(adapter.needs_the_whole for adapter in adapters)
        return is_special and not (name in self.packed and are_products(adapters))

    def _rounded(
        self, name: str, changes: list[LoraChange], wholes, dtype: torch.dtype, here: Span | None
    ) -> Tensor:
        """Return what ``_value`` sums, rounded once."""
        arguments = name, changes, wholes, torch.float32 if changes else dtype, here

        def compute() -> Tensor:
            return self._value(*arguments).to(dtype)

        return self.room.run(compute) if here else compute()

    def _value(
        self,
        name: str,
        changes: list[LoraChange],
        wholes: Mapping[str, Tensor],
        dtype: torch.dtype,
        here: Span | None = None,
    ) -> Tensor:
        """Return this rank's piece of a parameter, or the rows ``here`` of it, under its ``changes``;
        ``wholes``: parameters that are known as whole matrices."""
        shard = self.cuts.get(name.rpartition(".")[0])
        rows, columns = self._spans(name, self.cuts, here)
        if name in wholes and any(change.adapter.needs_the_whole for change in changes):
            shape = self.checkpoint.shapes[name]
            piece = cut(wholes[name], rows, columns)
            return piece if len(shape) == 2 else piece.reshape(len(piece), *shape[1:])
        stored = self.checkpoint.stored(name)
        # a plain value is the same wherever it is cast; of whole matrices a card may not have room for more
        device = self.room.place if here and stored.is_plain else self.read_on
        if here and stored.source.shape is None:
            value = self.checkpoint.read(name, dtype, device, Shard((here,), columns))
        else:  # stored in another shape, or no rows at all: some ranks have none
            value = self.checkpoint.read(name, dtype, device, shard)
            value = value if here is None else value[here.indices]
        return self._sum(name, value, changes, rows, columns) if changes and value.numel() else value

    def _scales(self, name: str, changes: LoraChanges) -> dict[str, WeightScales]:
        """Compute by what magnitudes multiply a quantized weight and its changes on this rank, and where they
        are of columns, all weights of the same tensor: one norm is over the rows of all."""
        names, own = [name], changes[name]
        if any(change.adapter.scales_columns for change in self._concerning(name, changes)):
            names, own = self._dependent(name, changes), self._concerning(name, changes)
        spans = {each: self._spans(each, self.cuts) for each in names}

        def compute() -> dict[str, WeightScales]:
            # of weights that wait on the host only the values are dequantized on the device
            where = self.read_on if self.room.is_full else self.packed[name].device
            return weight_scales(own, spans, self.checkpoint, self.room.place, where)

        return self.room.run(compute)

    def _set_adapters(
        self, name: str, changes: LoraChanges, wholes: Mapping[str, Tensor], scales: dict[str, WeightScales]
    ):
        """Put LoRAs next to a quantized weight, or adapters of other kinds into a copy that is held whole.
        ``scales``: those that are known, of weights of the same tensor."""
        weight = self.packed[name]
        own = changes.get(name, [])
        adapters = [change.adapter for change in own]
        if not are_products(adapters):
            weight.set_adapters({})
            value = self._value(name, own, wholes, torch.float32)
            weight.set_adapters({}, value.to(weight.device, weight.dtype))
            return
        matrix_shard = self._matrix_shard(name, self.cuts)
        if first_unscaled(adapters):
            weight.set_adapters({})
            if name not in scales:
                scales |= self._scales(name, changes)
            added = with_magnitudes(own, matrix_shard, scales[name], weight.device, weight.dtype)
        else:
            added = plain(own, matrix_shard, weight.device, weight.dtype, dict(weight.adapters))
        for change in own:
            held = added.adapters.get(change.key) or added.adapters.get(change.scaled_key)
            if isinstance(held, LowRank):
                self._ranks[name][change.key] = held.up.shape[1]
        weight.set_adapters(added.adapters, scales=added.scales)

    def _matrix_shard(self, name: str, cuts: Mapping[str, Shard]) -> MatrixShard:
        return MatrixShard(name, *self._spans(name, cuts), *matrix(self.checkpoint.shapes[name]))

    def _spans(
        self, name: str, cuts: Mapping[str, Shard], here: Span | None = None
    ) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Return the rows and columns of a parameter that these ``cuts`` keep, or its rows ``here``."""
        shard = cuts.get(name.rpartition(".")[0])
        height, width = matrix(self.checkpoint.shapes[name])
        if shard is None:
            return (here or Span(0, height),), (Span(0, width),)
        return shard.outputs, shard.inputs if len(self.checkpoint.shapes[name]) > 1 else (Span(0, width),)

    def _sum(self, name: str, value: Tensor, changes: list[LoraChange], rows, columns) -> Tensor:
        total = value.reshape(matrix(value.shape))
        for change in changes:
            where = change.target.pieces[name].rows(rows, self.checkpoint.shapes[name][0])
            total = change.adapter.add_to(total, change.use.strength, where, columns)
        return total.reshape(value.shape)

    def _wholes(self, name: str, changes: LoraChanges) -> dict[str, Tensor]:
        """Compute a parameter and those of the same tensor as whole matrices."""
        values = {}
        for piece in self._dependent(name, changes):
            value = self.checkpoint.read(piece, torch.float32, self.read_on)
            values[piece] = value.reshape(matrix(self.checkpoint.shapes[piece]))
        for change in self._concerning(name, changes):
            whole = torch.empty(change.target.shape, device=self.read_on)
            rows = {
                piece: _indices(source.rows((Span(0, len(values[piece])),), len(values[piece])))
                for piece, source in change.target.pieces.items()
            }
            for piece, where in rows.items():
                whole[where] = values[piece]
            whole = change.adapter.applied_to(whole, change.use.strength)
            values |= {piece: whole[where] for piece, where in rows.items()}
        return values


def _indices(spans: list[Span]) -> list[int]:
    return [index for span in spans for index in range(span.lo, span.hi)]
