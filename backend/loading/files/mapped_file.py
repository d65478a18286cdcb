"""A safetensors file mapped read-only, of which tensors are views: ranks of a machine share its pages, and it
may be larger than the memory."""

import json
import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import UnsupportedError, quoted, reason
from ...protocol import tensor_body
from .header_limits import unreadable

#: The format's name of a dtype -> torch's.
DTYPES = tensor_body.DTYPES | {
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8),  # which torch 2.6 has not
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}


class MappedFile:
    """The tensors of a file; ``entries``: what its header says of each. safetensors only checks the header:
    its own mapping is refused where a file exceeds the memory. Raises UnsupportedError."""

    def __init__(self, path: Path):
        try:
            with safe_open(str(path), framework="np") as checked:
                self.metadata: Mapping[str, str] = checked.metadata() or {}
            with path.open("rb") as file:
                self._begin = 8 + int.from_bytes(file.read(8), "little")
                self.entries: dict = json.loads(file.read(self._begin - 8))
                self._bytes = mapped(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise unreadable(path.name, kind="safetensors", why=reason(error)) from None
        self.entries.pop("__metadata__", None)

    def tensor(self, key: str) -> Tensor:
        """Return a tensor, which cannot be written to."""
        entry = self.entries[key]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            what = f"the tensor {quoted(key)} is stored as {entry['dtype']}, which is not supported"
            raise UnsupportedError(f"{what}; use a bf16, fp16, fp32, fp8 or GGUF file.")
        begin, end = (self._begin + offset for offset in entry["data_offsets"])
        data = self._bytes[begin:end]
        if begin % dtype.itemsize:  # a header that was not padded
            data = data.clone()
        return data.view(dtype).view(entry["shape"])


def mapped(file) -> Tensor:
    """Map an open file as bytes that cannot be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)
