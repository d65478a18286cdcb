"""Checks the header of a GGUF file before the gguf package reads it, which trusts every count in it.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

from ...errors import UnsupportedError, quoted
from .header_limits import unreadable
from .regular_files import MAX_HEADER_BYTES, open_regular

VERSIONS = (2, 3)
#: Bytes of a metadata value, by type; strings and arrays are read.
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING = 8
ARRAY = 9
UINT32 = 4
#: Most metadata, entries of all of its arrays together, and tensors; a tokenizer has more.
MAX_METADATA = 4_096
MAX_ARRAY_ENTRIES = 65_536
MAX_GGUF_TENSORS = 16_384
#: ggml has 4; ComfyUI-GGUF writes the 5 of a video model's first convolution.
MAX_DIMENSIONS = 5
ALIGNMENT = "general.alignment"


def check_gguf(path: Path):
    """Refuse a header that claims what is not there, or too much of it. Raises UnsupportedError."""
    with open_regular(path) as file:
        _Header(path.name, file).check()


class _Header:
    def __init__(self, name: str, file: BinaryIO):
        self.name = name
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.entries = 0
        self.alignment = 32

    def check(self):
        if self.take(4) != b"GGUF":
            self.refuse("it does not begin with GGUF")
        version = self.number("<I")
        if version not in VERSIONS:
            self.refuse(f"its version is {version}")
        tensors = self.number("<Q")
        fields = self.number("<Q")
        self.few("tensors", count=tensors, most=MAX_GGUF_TENSORS)
        self.few("metadata entries", count=fields, most=MAX_METADATA)
        for _ in range(fields):
            self.field()
        if not (0 < self.alignment <= 1 << 16 and self.alignment & (self.alignment - 1) == 0):
            self.refuse(f"its alignment is {self.alignment}")
        ends = [self.tensor() for _ in range(tensors)]
        start = -(-self.file.tell() // self.alignment) * self.alignment
        if start + max(ends, default=0) > self.size:
            self.refuse(f"its tensors end at byte {start + max(ends):,} and the file has {self.size:,}")

    def field(self):
        key = self.string()
        kind = self.number("<I")
        if key == ALIGNMENT.encode():
            if kind != UINT32:
                self.refuse("its alignment is no number")
            self.alignment = self.number("<I")
        else:
            self.value(kind)

    def value(self, kind: int, inside: bool = False):
        if kind in SIZES:
            self.take(SIZES[kind])
        elif kind == STRING:
            self.string()
        elif kind == ARRAY and not inside:
            each = self.number("<I")
            count = self.number("<Q")
            self.entries += count
            self.few("entries in arrays of its metadata", count=self.entries, most=MAX_ARRAY_ENTRIES)
            for _ in range(count):
                self.value(each, inside=True)
        else:
            self.refuse(f"its metadata has a value of type {kind}" + " in an array" * inside)

    def tensor(self) -> int:
        """Walk over one tensor's entry; return where its bytes end, from the first of all."""
        import gguf

        name = self.string()
        dimensions = self.number("<I")
        if dimensions > MAX_DIMENSIONS:
            self.refuse(f"the tensor {_text(name)} has {dimensions} dimensions")
        values = math.prod(self.number("<Q") for _ in range(dimensions))
        kind = self.number("<I")
        offset = self.number("<Q")
        if kind not in set(gguf.GGMLQuantizationType):
            self.refuse(f"the tensor {_text(name)} is of the type {kind}, which is none")
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        return offset + values // block * size

    def string(self) -> bytes:
        return self.take(self.number("<Q"))

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def take(self, count: int) -> bytes:
        position = self.file.tell()
        if count > self.size - position:
            self.refuse(f"{count:,} bytes are said to follow where {self.size - position:,} do")
        if position + count > MAX_HEADER_BYTES:
            what = f"{quoted(self.name)} has a header of more than {MAX_HEADER_BYTES:,} bytes"
            raise UnsupportedError(f"{what}, so it is no diffusion transformer; use another file.")
        return self.file.read(count)

    def few(self, what: str, count: int, most: int):
        if count > most:
            raise UnsupportedError(
                f"{quoted(self.name)} says that it has {count:,} {what}, and a diffusion transformer has "
                f"{most:,} at most; the file is damaged, or of a language model: use another one."
            )

    def refuse(self, why: str):
        raise unreadable(self.name, kind="GGUF", why=why)


def _text(name: bytes) -> str:
    return quoted(name.decode(errors="replace"))
