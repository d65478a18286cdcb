"""A rank's weights with LoRAs in them, made from the checkpoint's own, which are read again: what is taken
out is gone to the last bit."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path

import torch
from torch import Tensor

from ..parallel import fsdp
from ..parallel.matrix_cuts import Shard
from ..parallel.sequence import Span
from ..quantization.packed_weight import LowRank, PackedWeight
from ..units import fine_gigabytes
from .adapters import Adapter, LoRA, cut, is_low_rank, matrix
from .checkpoint import Checkpoint
from .lora_keys import Lora, LoraUse, Targets, file_state, open_lora
from .lora_selection import Target
from .lora_validation import check_values

#: LoRAs in the order in which they are added.
Stack = tuple[LoraUse, ...]
#: What is in weights of which a change has failed: no stack that anybody asks for.
UNKNOWN: Stack = (LoraUse("", 0.0),)
#: LoRAs of a model whose keys are cached: those of Qwen-Image Lightning take 0.1 s to sort.
OPENED = 8


@dataclass(frozen=True, eq=False)
class LoraChange:
    """The ``order``-th change of a stack: an adapter of one of its LoRAs, on one tensor."""

    order: int
    use: LoraUse
    target: Target
    adapter: Adapter

    @property
    def key(self) -> tuple:
        """Tells an adapter of a file from others, whatever its strength."""
        return self.use.path, self.use.stamp, *self.adapter.keys.values()


#: Parameter -> its changes in order, on all ranks.
LoraChanges = Mapping[str, list[LoraChange]]


class FusedWeights:
    """The parameters that this rank holds of a loaded ``checkpoint``, with the LoRAs of ``stack`` in them.

    ``cuts``: module -> the piece of its weight that a tensor-parallel rank keeps. ``device``: where the
    checkpoint was read to, for the same bits.
    """

    def __init__(self, checkpoint: Checkpoint, cuts: Mapping[str, Shard], device: torch.device):
        self.checkpoint = checkpoint
        self.cuts = cuts
        self.device = device
        # by module, which stays the same whatever is wrapped around it later
        self.packed = {
            name: weight
            for name, weight in checkpoint.transformer.named_modules()
            if isinstance(weight, PackedWeight)
        }
        self.places = {
            name: (checkpoint.transformer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, parameter in checkpoint.transformer.named_parameters()
            if not parameter.is_meta and name.rpartition(".")[0] not in self.packed
        }
        shapes = {name: checkpoint.shapes[name] for name in checkpoint.parameters}
        self.targets = Targets(checkpoint.family.layout, shapes)
        self.stack: Stack = ()
        self._held: dict[str, Stack] = {}
        #: (parameter, key of a change) -> rank of what is held of its adapter, once it was.
        self._ranks: dict[tuple, int] = {}
        #: (path, state of its file) -> the LoRA, the last one used last.
        self._opened: dict[tuple, Lora] = {}

    def open(self, stack: Stack) -> list[Lora]:
        """Open the LoRAs of a stack, reading the headers of files that have changed. Raises
        UnsupportedError."""
        loras = [self._open(use.path) for use in stack]
        for oldest in list(self._opened)[: -max(OPENED, len(stack))]:
            del self._opened[oldest]
        return loras

    def _open(self, path: str) -> Lora:
        key = path, file_state(path)
        lora = self._opened.pop(key, None) or open_lora(path, self.targets, self.checkpoint.name)
        self._opened[key] = lora
        return lora

    def check(self, stack: Stack) -> list[Lora]:
        """Open the LoRAs and check every value that would be added. Raises UnsupportedError."""
        loras = self.open(stack)
        for use, lora in zip(stack, loras):
            check_values(lora.path, use.strength, lora.adapters)
        return loras

    def cost(self, lora: Lora) -> str:
        """Say what a LoRA costs next to quantized weights, empty where it is little: adapters other than
        low-rank ones are added to a copy of the layer in the compute dtype."""
        names = {
            name
            for target, adapter in lora.adapters
            for name in target.pieces
            if name in self.packed and not is_low_rank(adapter)
        }
        if not names:
            return ""
        size = sum(self.packed[name].shape.numel() * self.packed[name].dtype.itemsize for name in names)
        return (
            f"The LoRA {Path(lora.path).name} is no product of small matrices in {len(names)} quantized "
            f"layers, which are held a second time for it, in {fine_gigabytes(size)} a rank."
        )

    @torch.inference_mode(False)  # parameters outlive the request that asks for them
    def fuse(self, stack: Stack):
        """Have the LoRAs of ``stack`` in the weights and no others, changing only the parameters that differ.
        Raises UnsupportedError.

        A parameter is what the checkpoint holds and what the LoRAs add, summed in float32 and rounded once to
        the parameter's dtype. Beside a quantized weight, which stays as it is, LoRAs are products of their
        own; with adapters of other kinds it is computed as a whole and held too.
        """
        if stack == self.stack:
            return
        changes = self._changes(stack)
        held = [name for name in changes if name in self.places or name in self.packed]
        wanted = {name: tuple(change.use for change in self._concerning(name, changes)) for name in held}
        changed = [name for name in {**self._held, **wanted} if self._held.get(name) != wanted.get(name)]

        def together(name):
            return self.targets.together[name].name

        if changed:
            fsdp.reshard(self.checkpoint.transformer)
        try:
            for _, names in groupby(sorted(changed, key=together), key=together):
                self._put(list(names), changes)
        except BaseException:  # out of memory, a file that is gone: nothing is known of those that change
            self._forget(changed)
            raise
        self._held = wanted
        self.stack = stack

    def _forget(self, names: list[str]):
        """Have parameters made again by the next ``fuse``, whatever its stack, and free what is next to
        quantized ones."""
        self.stack = UNKNOWN
        self._held |= dict.fromkeys(names, UNKNOWN)
        for weight in (self.packed[name] for name in names if name in self.packed):
            weight.set_adapters({})

    def adapter_bytes(self, stack: Stack, dtype: torch.dtype, quantized: Collection[str] = ()) -> int:
        """Count the bytes that the LoRAs of ``stack`` take next to quantized weights, in ``dtype``: on this
        rank, or on one that holds the whole model, of which these parameters are ``quantized``."""
        cuts = {} if quantized else self.cuts
        quantized_names = quantized or self.packed
        # of UNKNOWN, no file's, the adapters next to quantized weights have gone
        found = self._changes(stack) if quantized_names and stack != UNKNOWN else {}
        numbers = 0
        for name, changes in found.items():
            if name not in quantized_names:
                continue
            rows, columns = (sum(map(len, spans)) for spans in self._spans(name, cuts))
            if all(is_low_rank(change.adapter) for change in changes):
                ranks = {each.key: self._held_rank(name, each, bool(quantized)) for each in changes}
                numbers += sum(ranks.values()) * (rows + columns)
            else:
                numbers += rows * columns
        return numbers * dtype.itemsize

    def _held_rank(self, name: str, change: LoraChange, of_whole: bool) -> int:
        """Return the rank of what a low-rank change takes next to a quantized weight, or could take before it
        was there. ``of_whole``: the matrix is not cut, even if it is on this rank."""
        assert is_low_rank(change.adapter), "checked by the caller"
        has_a_part = of_whole and name.rpartition(".")[0] in self.cuts
        if has_a_part and not isinstance(change.adapter, LoRA):  # others have blocks for rows and columns
            return change.adapter.factor_rank
        return self._ranks.get((name, change.key)) or change.adapter.factor_rank

    def held_adapter_bytes(self) -> int:
        """Count the bytes of LoRAs that are beside quantized weights now. No file is opened."""
        weights = self.packed.values()
        held = [
            each for weight in weights for lora in weight.adapters.values() for each in (lora.up, lora.down)
        ]
        return sum(each.nbytes for each in [*held, *(weight.whole for weight in weights)] if each is not None)

    def _changes(self, stack: Stack) -> LoraChanges:
        found = defaultdict(list)
        order = count()
        for use, lora in zip(stack, self.open(stack)):
            for target, adapter in lora.adapters if use.strength else ():
                change = LoraChange(next(order), use, target, adapter)
                for name in target.pieces:
                    found[name].append(change)
        return dict(found)

    def _concerning(self, name: str, changes: LoraChanges) -> list[LoraChange]:
        """Return all changes on which a parameter's value depends, in order."""
        mine = changes.get(name, [])
        if not any(change.adapter.needs_the_whole for change in mine):
            return mine
        pieces = self.targets.together[name].pieces
        concerning = {change for piece in pieces for change in changes.get(piece, ())}
        return sorted(concerning, key=lambda change: change.order)

    def _put(self, names: list[str], changes: LoraChanges):
        """Give parameters that the single file keeps in one tensor their values under ``changes``."""
        special = [
            name for name in names if any(change.adapter.needs_the_whole for change in changes.get(name, ()))
        ]
        wholes = self._wholes(special[0], changes) if special else {}
        for name in names:
            if name in self.packed:
                self._set_adapters(self.packed[name], name, changes.get(name, []), wholes)
                continue
            parameter = getattr(*self.places[name])
            here = fsdp.own_rows(parameter)
            dtype = torch.float32 if name in changes else parameter.dtype
            value = self._value(name, changes.get(name, []), wholes, dtype, here)
            fsdp.assign(parameter, value.to(parameter.dtype))

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
            height = sum(map(len, rows))
            width = sum(map(len, columns))
            own = (height, width) if len(shape) == 2 else (height, *shape[1:])
            return cut(wholes[name], rows, columns).reshape(own)
        if here and self.checkpoint.sources[name].shape is None:
            value = self.checkpoint.read(name, dtype, self.device, Shard((here,), columns))
        else:  # stored in another shape, or no rows at all: some ranks have none
            value = self.checkpoint.read(name, dtype, self.device, shard)
            value = value if here is None else value[here.indices]
        return self._sum(name, value, changes, rows, columns) if changes and value.numel() else value

    def _set_adapters(self, weight: PackedWeight, name: str, changes: list[LoraChange], wholes):
        """Put LoRAs next to a quantized weight, or adapters of other kinds into a copy that is held whole."""
        known = dict(weight.adapters)
        adapters = {}
        if not all(is_low_rank(change.adapter) for change in changes):
            weight.set_adapters({})
            value = self._value(name, changes, wholes, torch.float32)
            weight.set_adapters({}, value.to(weight.device, weight.dtype))
            return
        rows, columns = self._spans(name, self.cuts)
        for change in changes:
            if change.key not in known:
                where = change.target.pieces[name].rows(rows, self.checkpoint.shapes[name][0])
                assert is_low_rank(change.adapter), "checked above"
                up, down = _used(*change.adapter.factors(where, columns, weight.device))
                up = up * change.adapter.scale
                self._ranks[name, change.key] = up.shape[1]
                known[change.key] = LowRank(up.to(weight.dtype), down.to(weight.dtype), 0.0)
            before = adapters.get(change.key)
            strength = change.use.strength + (before.strength if before else 0.0)
            adapters[change.key] = replace(known[change.key], strength=strength)
        weight.set_adapters(adapters)

    def _spans(
        self, name: str, cuts: Mapping[str, Shard], here: Span | None = None
    ) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Return the rows and columns of a parameter that a rank with these ``cuts`` keeps, or its rows
        ``here``."""
        shard = cuts.get(name.rpartition(".")[0])
        height, width = matrix(self.checkpoint.shapes[name])
        if shard is None:
            return (here or Span(0, height),), (Span(0, width),)
        return shard.outputs, shard.inputs if len(self.checkpoint.shapes[name]) > 1 else (Span(0, width),)

    def _sum(self, name: str, value: Tensor, changes: list[LoraChange], rows, columns) -> Tensor:
        total = value.reshape(matrix(value.shape))
        height = self.checkpoint.shapes[name][0]
        for change in changes:
            where = change.target.pieces[name].rows(rows, height)
            total = change.adapter.add_to(total, change.use.strength, where, columns)
        return total.reshape(value.shape)

    def _wholes(self, name: str, changes: LoraChanges) -> dict[str, Tensor]:
        """Compute a parameter and those of the same tensor in the single file as whole matrices."""
        values = {}
        for piece in self.targets.together[name].pieces:
            value = self.checkpoint.read(piece, torch.float32, self.device)
            values[piece] = value.reshape(matrix(self.checkpoint.shapes[piece]))
        for change in self._concerning(name, changes):
            whole = torch.empty(change.target.shape, device=self.device)
            rows = {
                piece: _indices(source.rows((Span(0, len(values[piece])),), len(values[piece])))
                for piece, source in change.target.pieces.items()
            }
            for piece, where in rows.items():
                whole[where] = values[piece]
            whole = change.adapter.applied_to(whole, change.use.strength)
            values |= {piece: whole[where] for piece, where in rows.items()}
        return values


def _used(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out what changes none of these rows, or reads none of these columns: ComfyUI's loaders name
    queries, keys and values as one tensor, and of the product of their three LoRAs
    (nodes/host/stock_loras.py) each row has a third. A LoKr's factors have a block for each of its own."""
    used = up.ne(0).any(dim=0) & down.ne(0).any(dim=1)
    used[:1] |= not used.any()
    return (up, down) if used.all() else (up[:, used], down[used])


def _indices(spans: list[Span]) -> list[int]:
    return [index for span in spans for index in range(span.lo, span.hi)]
