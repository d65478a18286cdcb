"""A piece of a quantized matrix as its file stores it, and the weight that it stands for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from .formats import Format, Settings

#: Values that are dequantized at once where that takes a few passes, as long as those hold no more than SMALL
#: bytes: a GPU takes longer for a pass than its host to start it (an H200 waited for its host with a fourth
#: of them). One pass holds nothing, and MANY_KERNELS take as many values as hold HELD bytes.
CHUNK, SMALL = 1 << 24, 1 << 26
MANY_KERNELS, HELD = 10, 160_000_000
#: Roles of tensors with columns of the matrix, each an element or a block.
WITH_COLUMNS = ("values", "block_scales", "smoothing")


@dataclass(frozen=True)
class Packed:
    """Rows and whole blocks of columns of a quantized matrix.

    tensors: role -> what is stored (formats.py), each of all these rows and columns. column_runs: the runs of
    ``columns`` that belong to the piece: a block can only be read as a whole.
    """

    format: Format
    settings: Settings
    tensors: Mapping[str, Tensor]
    columns: int
    column_runs: tuple[range, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        return len(self.tensors["values"]), sum(map(len, self.column_runs))

    @property
    def device(self) -> torch.device:
        return self.tensors["values"].device

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Compute the weight in ``dtype``, into ``out`` (of ``shape``) if given; of a large one some rows at
        a time."""
        rows, _ = self.shape
        step = rows_at_once(self.format, self.columns)
        if self.column_runs != (range(self.columns),):  # they are made as a whole before some are taken
            step = min(step, max(1, CHUNK // 4 // max(1, self.columns)))
        out = torch.empty(self.shape, dtype=dtype, device=self.device) if out is None else out
        for start in range(0, rows, step):
            self._dequantize_rows(slice(start, start + step), out[start : start + step])
        return out

    def _dequantize_rows(self, rows: slice, out: Tensor):
        stored = {role: value[rows] if value.ndim > 1 else value for role, value in self.tensors.items()}
        is_whole = self.column_runs == (range(self.columns),)
        weight = self.format.weight(stored, self.settings, out.dtype, out if is_whole else None)
        if weight is not out:  # the copy rounds to its type
            out.copy_(weight if is_whole else columns_of(weight, self.column_runs))
        smoothing = stored.get("smoothing")
        if smoothing is not None:
            out.mul_((smoothing if is_whole else columns_of(smoothing, self.column_runs)).to(out.dtype))


def rows_at_once(form: Format, columns: int) -> int:
    """Return how many rows of so many columns are dequantized at once."""
    held = max(1.0, form.effort.made)
    is_quick = 2 < form.effort.kernels < MANY_KERNELS
    values = min(CHUNK, int(SMALL / held)) if is_quick else int(HELD / held)
    return max(1, values // max(1, columns))


def columns_of(tensor: Tensor, runs: Sequence[range]) -> Tensor:
    """Return these runs of the last dimension, one after the other."""
    return _cat([tensor[..., run.start : run.stop] for run in runs], dim=-1)


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Put tensors of one type one after the other; those of 8-bit floats as bytes, for which early versions
    of torch have no kernel on GPUs (kohya-ss/sd-scripts issue 1711)."""
    dtype = tensors[0].dtype
    if not dtype.is_floating_point or dtype.itemsize > 1:
        return torch.cat([*tensors], dim=dim)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors], dim=dim).view(dtype)


def join(pieces: Sequence[Packed], dim: int) -> Packed:
    """Put pieces of one matrix below each other (``dim`` 0) or next to each other (1)."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    tensors = dict(first.tensors)
    for role, tensor in first.tensors.items():
        every = [piece.tensors[role] for piece in pieces]
        if dim == 0 and tensor.ndim > 1:
            tensors[role] = _cat(every, dim=0)
        elif dim == 1 and role in WITH_COLUMNS:
            tensors[role] = _cat(every, dim=-1)  # which smoothing has alone
    if dim == 0:
        return replace(first, tensors=tensors)
    starts = accumulate((piece.columns for piece in pieces), initial=0)
    runs = tuple(
        range(start + run.start, start + run.stop)
        for start, piece in zip(starts, pieces)
        for run in piece.column_runs
    )
    return replace(
        first, tensors=tensors, columns=sum(piece.columns for piece in pieces), column_runs=_merged(runs)
    )


def _merged(runs: Sequence[range]) -> tuple[range, ...]:
    """Return runs of which none begins where the one before it ends."""
    found: list[range] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            run = range(found.pop().start, run.stop)
        found.append(run)
    return tuple(found)
