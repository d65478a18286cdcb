"""Tensors as the body of a frame: valid safetensors, written and read without copying their bytes.

A body is a table (its length in 8 bytes, then JSON: name -> dtype, shape, place) and data. The library's
``save`` and ``load`` copy every tensor, which takes several times as long as the socket. Format:
https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
import struct
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

LENGTH = struct.Struct("<Q")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Most dimensions of a tensor, and most elements along those that are not 0: beyond them strides overflow.
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: bytes lo <= byte < hi of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    lo: int
    hi: int


def pack(tensors: dict[str, Tensor]) -> tuple[bytes, list[memoryview]]:
    """Return the table of ``tensors`` and views of their bytes in its order; they must not change before they
    are sent. Neighbours in memory are one chunk, so a body that was received is one chunk again. Raises
    ValueError for a dtype that has no name in the format."""
    table = {}
    runs = []
    at = 0
    # large elements first, so that all lie at multiples of their size
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in NAMES:
            what = f"the tensor {name!r} is of {tensor.dtype}, which cannot be sent"
            raise ValueError(f"{what}; choose one of {', '.join(map(str, NAMES))}.")
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        table[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
        if runs and len(data) and _adjoin(runs[-1], data):
            runs[-1] = runs[-1].as_strided((len(runs[-1]) + len(data),), (1,))
        elif len(data):
            runs.append(data)
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % LENGTH.size)
    return LENGTH.pack(len(text)) + text, [memoryview(run.numpy()) for run in runs]


def _adjoin(first: Tensor, then: Tensor) -> bool:
    same = first.untyped_storage().data_ptr() == then.untyped_storage().data_ptr()
    return same and first.storage_offset() + len(first) == then.storage_offset()


def entries(text: bytes, size: int) -> list[TensorEntry]:
    """Return the tensors of a table's JSON; ValueError unless they fill ``size`` bytes without overlap."""
    table = json.loads(text)
    if not isinstance(table, dict):
        raise ValueError("the table of tensors is no JSON object")
    table.pop("__metadata__", None)
    in_order = [_checked_entry(name, entry) for name, entry in table.items()]
    in_order.sort(key=attrgetter("lo", "hi"))
    at = 0
    for place in in_order:
        if place.lo != at:
            raise ValueError(f"the tensor {place.name!r} begins at byte {place.lo}, the last ends at {at}")
        at = place.hi
    if at != size:
        raise ValueError(f"the tensors fill {at} bytes of {size}")
    return in_order


def _checked_entry(name: str, entry: dict) -> TensorEntry:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of the tensor {name!r} is not a dtype, a shape and offsets")
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise ValueError(f"the tensor {name!r} has the unknown dtype {str(entry['dtype'])[:20]!r}")
    are_sizes = _are_sizes(shape, MAX_DIMENSIONS) and _are_sizes(offsets, 2) and len(offsets) == 2
    if not are_sizes or math.prod(filter(None, shape)) > MAX_ELEMENTS:
        raise ValueError(f"the tensor {name!r} has no valid shape and offsets")
    dtype = DTYPES[entry["dtype"]]
    lo, hi = offsets
    if math.prod(shape) * dtype.itemsize != hi - lo or lo % dtype.itemsize:
        raise ValueError(f"the tensor {name!r} of shape {shape} does not fit bytes {lo} to {hi}")
    return TensorEntry(name, dtype, tuple(shape), lo, hi)


def _are_sizes(numbers, most: int) -> bool:
    is_short = isinstance(numbers, list) and len(numbers) <= most
    return is_short and all(type(number) is int and number >= 0 for number in numbers)


def unpack(in_order: list[TensorEntry], data: Tensor) -> dict[str, Tensor]:
    """Return the tensors at their places of ``data`` (uint8), as views of it."""
    tensors = {}
    for place in in_order:
        values = data[place.lo : place.hi]
        # a byte that is neither 0 nor 1 is no bool to index with
        values = values != 0 if place.dtype is torch.bool else values.view(place.dtype)
        tensors[place.name] = values.view(place.shape)
    return tensors
