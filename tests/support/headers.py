"""Headers of released model files, without data: names, shapes and types as they are, folded into patterns.

``tests/headers/released.json.gz`` holds file -> {"tensors", "metadata", "data"}. A tensor's key has {} in the
place of its first number; its entry is [type, shape, numbers], where a count stands for 0 to count - 1 and
null for a name without a number. "data" is the text of the few tensors that must hold something.
"""

import gzip
import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import cast

import torch

from backend.loading.checkpoint import Checkpoint
from backend.loading.files.safetensors_files import FLOATING, TensorFiles
from backend.loading.quantized import QuantizedFiles
from backend.loading.recognition import check_complete, recognise

RELEASED = Path(__file__).parents[1] / "headers" / "released.json.gz"
#: Key -> (type, shape).
Tensors = Mapping[str, tuple[str, list[int]]]
ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I8": 1, "I64": 8}
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


class HeaderFiles:
    """A safetensors file of which the header alone is there (see safetensors_files.TensorFiles)."""

    def __init__(self, name: str, header: dict):
        self.name = name
        self.size = self.bytes_read = 0
        self.metadata = header["metadata"] or {}
        tensors = unfold(header["tensors"])
        self.shapes = {key: tuple(shape) for key, (_, shape) in tensors.items()}
        self._types = {key: dtype for key, (dtype, _) in tensors.items()}
        self._data = header["data"]

    def dtype(self, key):
        return FLOATING[self._types[key]]

    def stored_dtype(self, key):
        return self._types[key]

    def read(self, key, rows=None, columns=None, dtype=None, device=None):
        """Return the bytes of a tensor that holds text."""
        return torch.tensor(list(self._data[key].encode()), dtype=torch.uint8)


@cache
def released() -> dict[str, dict]:
    """File name -> folded header."""
    return json.loads(gzip.decompress(RELEASED.read_bytes()))


@lru_cache(maxsize=8)  # tests that ask for the same file come one after the other
def opened(name: str) -> Checkpoint:
    """Return the checkpoint of a released file, by its header: that of earlier calls, so nobody changes it.
    Raises UnsupportedError."""
    header = released()[name]
    checkpoint = recognise(
        f"{name}.safetensors", QuantizedFiles(cast(TensorFiles, HeaderFiles(name, header)))
    )
    check_complete(checkpoint)
    return checkpoint


def unfold(folded: dict) -> dict[str, tuple[str, list[int]]]:
    """Return key -> (type, shape) of folded tensors."""
    shapes = {}
    for pattern, entries in folded.items():
        for dtype, shape, numbers in entries:
            count = range(numbers) if isinstance(numbers, int) else numbers or [""]
            shapes |= {pattern.replace("{}", str(i), 1): (dtype, shape) for i in count}
    return shapes


def fold(tensors: dict) -> dict:
    """Fold key -> (type, shape), as the file keeps it."""
    groups = defaultdict(lambda: defaultdict(list))
    for key, (dtype, shape) in tensors.items():
        number = NUMBER.search(key)
        pattern = NUMBER.sub("{}", key, count=1)
        groups[pattern][dtype, tuple(shape)].append(int(number[0]) if number else None)
    return {
        pattern: [[dtype, list(shape), _numbers(numbers)] for (dtype, shape), numbers in shapes.items()]
        for pattern, shapes in groups.items()
    }


def write_sparse(path: Path, tensors: Tensors, metadata: dict | None = None) -> Path:
    """Write a safetensors file of these tensors whose data is a hole, which takes no room on a disk."""
    header, offset = {"__metadata__": metadata} if metadata else {}, 0
    for key, (dtype, shape) in tensors.items():
        size = math.prod(shape) * ITEMSIZE[dtype]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as released files do: values are where their types may be
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return path


def _numbers(numbers: list):
    if numbers == [None]:
        return None
    numbers = sorted(numbers)
    return len(numbers) if numbers == list(range(len(numbers))) else numbers
