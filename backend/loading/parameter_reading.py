"""Reading one parameter from a checkpoint's files: all of it, or the piece that a rank keeps."""

import torch

from ..parallel.tensor_parallel import Shard
from .parameter_sources import Source
from .safetensors_files import Weights


def read_whole(
    files: Weights, key: str, source: Source, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Read the rows of the tensor ``key`` that ``source`` names, in the parameter's order and shape."""
    rows = slice(source.lo, source.hi) if source.hi is not None else slice(None)
    tensor = files.read(key, rows, dtype=dtype, device=device)
    if source.swap:
        tensor = torch.cat(tensor.chunk(2)[::-1])
    return tensor if source.shape is None else tensor.reshape(source.shape)


def read_shard(
    files: Weights,
    key: str,
    source: Source,
    shard: Shard,
    height: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Read the rows and columns that ``shard`` keeps of a parameter of ``height`` rows, and nothing else."""
    rows = [slice(span.lo, span.hi) for span in source.rows(shard.outputs, height)]
    columns = [slice(None)]
    if len(files.shapes[key]) > 1:
        columns = [slice(span.lo, span.hi) for span in shard.inputs]
    return _cat([_cat([files.read(key, r, c, dtype, device) for c in columns], -1) for r in rows], 0)


def _cat(pieces: list[torch.Tensor], dim: int) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)  # one alone stays where it is mapped
