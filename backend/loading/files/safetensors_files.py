"""safetensors files, mapped and read by slices; bytes are counted."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import UnsupportedError, quoted
from ...models.key_layout import Shapes
from ...protocol import tensor_body
from ...quantization.formats import Quantization
from ...quantization.packed import Packed
from ..staging import upload
from .allowed_folders import ANYWHERE, Folders
from .header_limits import check_header_sizes, check_names, shards
from .mapped_file import MappedFile
from .regular_files import not_regular

#: The format's name of a floating dtype -> torch's.
FLOATING = {name: dtype for name, dtype in tensor_body.DTYPES.items() if dtype.is_floating_point}
CPU = torch.device("cpu")
ALL = slice(None)
#: A folder's whole file or index, whose name may tell a precision, at one of two places; no shard.
WEIGHTS = re.compile(
    r"(?!.*-\d+-of-\d+)[^.]+(?:\.(?P<precision>[^.]+))?\.safetensors(?:\.index(?:\.(?P<older>[^.]+))?\.json)?"
)
#: Precisions of one folder, preferred first; without a name it is the one that was released.
PRECISIONS = ("", "bf16", "fp16", "fp32")


class StoredSize(NamedTuple):
    """A tensor of a quantized matrix: its first dimension, and its bytes."""

    length: int
    bytes: int


class Weights(Protocol):
    """Tensors of a checkpoint, whatever it stores them as. shapes: those of the weights; size: bytes of the
    files; bytes_read: what was read of them so far."""

    size: int
    shapes: Shapes
    metadata: Mapping[str, str]

    @property
    def bytes_read(self) -> int: ...

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's floating dtype, of its values where it is quantized. Raises UnsupportedError."""
        ...

    def read(self, key: str, rows=ALL, columns=ALL, dtype: torch.dtype | None = None, device=CPU) -> Tensor:
        """Read rows and columns (slices) of a tensor, and no more, in ``dtype`` or the stored one."""
        ...

    def packed(self, key: str, rows=ALL, columns=ALL, device=CPU) -> Packed | None:
        """Read rows and columns of a quantized matrix as they are stored; None for what is none."""
        ...

    def quantization(self, key: str) -> Quantization | None:
        """Return the format of a quantized matrix, and what the file says of it; None for what is none."""
        ...

    def is_plain(self, key: str) -> bool:
        """Return whether values are stored as such, so that ``read`` casts them at most."""
        ...

    def stored_sizes(self, key: str, rows: int, columns: Iterable[range]) -> list[StoredSize] | None:
        """Measure what ``packed`` would read of so many rows, and of the whole blocks of each of these runs
        of columns; None for what is no quantized matrix."""
        ...


class TensorFiles:
    """The tensors of safetensors files under one set of names. Headers are read at once, data on demand."""

    def __init__(self, paths: list[Path]):
        self.bytes_read = 0
        self.name = paths[0].name
        for path in paths:
            _check_kind(path)
        check_header_sizes(paths)
        files = [MappedFile(path) for path in paths]
        self.size = sum(path.stat().st_size for path in paths)
        self._where = {key: file for file in files for key in file.entries}
        if not self._where:
            raise UnsupportedError(f"{quoted(self.name)} holds no tensors; download it again.")
        check_names(self.name, self._where)
        self.metadata: Mapping[str, str] = {
            name: text for file in files for name, text in file.metadata.items()
        }
        self.shapes: Shapes = {key: tuple(file.entries[key]["shape"]) for key, file in self._where.items()}

    def dtype(self, key: str) -> torch.dtype:
        """Implement Weights.dtype; packed integers are refused."""
        name = self.stored_dtype(key)
        if name not in FLOATING:
            what = f"the tensor {quoted(key)} is stored as {name}, a quantization that is not supported"
            raise UnsupportedError(f"{what}; use a bf16, fp16, fp32, fp8 or GGUF file.")
        return FLOATING[name]

    def stored_dtype(self, key: str) -> str:
        """Return the file's own name of a tensor's dtype ("BF16", "U8", ...)."""
        return self._where[key].entries[key]["dtype"]

    def read(self, key: str, rows=ALL, columns=ALL, dtype: torch.dtype | None = None, device=CPU) -> Tensor:
        """Implement Weights.read. On the CPU, values in their stored dtype stay mapped: ranks share them."""
        tensor = self._where[key].tensor(key)
        if columns != ALL:
            tensor = tensor[rows, columns].contiguous()
        elif rows != ALL:
            tensor = tensor[rows]
        self.bytes_read += tensor.nbytes
        tensor = upload(tensor, device)  # few bytes travel, then become many
        return tensor if dtype is None else tensor.to(dtype)


def _check_kind(path: Path):
    if path.exists() and not path.is_file():
        raise not_regular(path)
    if not path.is_file():
        raise UnsupportedError(f"there is no file {path}; check model_name, or the folder's index.")
    if path.suffix not in (".safetensors", ".sft"):
        what = f"{path.name} is not a .safetensors file, nor .gguf"
        raise UnsupportedError(f"{what}; convert it, since other formats can run code when they are opened.")


def weight_paths(folder: Path, allowed: Folders = ANYWHERE) -> list[Path]:
    """Return a diffusers folder's safetensors file, or those of its index, which may link to ``allowed``. Of
    several precisions it is that without a name, else the first of PRECISIONS, else the only one."""
    precisions = defaultdict(list)
    for path in sorted(folder.glob("*.safetensors*")):
        named = WEIGHTS.fullmatch(path.name)
        if named:
            precisions[named["precision"] or named["older"] or ""].append(path)
    preferred = [name for name in PRECISIONS if name in precisions] or list(precisions)
    files = sorted(folder.glob("*.safetensors"))
    if preferred and (len(preferred) == 1 or preferred[0] in PRECISIONS):
        files = precisions[preferred[0]]
    indices = [path for path in files if path.suffix == ".json"]
    if indices:
        return shards(indices[0], allowed)
    if len(files) != 1:
        raise UnsupportedError(
            f"the folder {folder.name} holds {len(files)} safetensors files and no index; a diffusers "
            f"transformer folder has one file, or several with a .safetensors.index.json."
        )
    return files


def largest(x: Tensor) -> float:
    """Return the largest magnitude in ``x``; NaN where it holds one."""
    if not x.numel():
        return 0.0
    if not x.is_floating_point() or x.element_size() == 1:  # torch has no extremes of float8
        x = x.float()
    low, high = torch.aminmax(x)
    return max(-low.item(), high.item()) if low == low else math.nan
