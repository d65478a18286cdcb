"""What a LoRA file must be before any rank adds it: shapes that multiply, an alpha that is one number, and
values that are numbers. Refusals name the file and its key.

Rank 0 alone looks, when a client names the file: on the ranks an error of one would end all.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .adapters import Adapter
from .safetensors_files import DTYPES

#: Stored types of an alpha that is an integer.
INTEGERS = ("I64", "I32", "I16", "I8", "U8")
#: Most that an adapter may add to a weight: float32 holds it with room to spare.
LARGEST = 1e30
#: Files whose values are remembered.
FILES = 64


def check_form(name: str, adapter: Adapter):
    """Refuse an adapter of the file ``name`` whose tensors have no form that can be added, from the header
    alone. Raises UnsupportedError."""
    for role, key in adapter.keys.items():
        _check_stored(name, adapter, role, (*DTYPES, *INTEGERS) if role == "alpha" else DTYPES)
        if role in adapter.weights and role != "difference" and len(adapter.files.shapes[key]) < 2:
            raise _malformed(name, f"{_describe(adapter, role)}, but a matrix is needed")
    _check_products(name, adapter)
    alpha = adapter.keys.get("alpha")
    count = math.prod(adapter.files.shapes[alpha]) if alpha else 1
    if count != 1:
        raise _malformed(name, f"{alpha!r:.120} holds {count} values, but an alpha is one number")


def _check_products(name: str, adapter: Adapter):
    for left, right in adapter.products:
        (_, inner), (other, _) = adapter.shape_of(left), adapter.shape_of(right)
        if inner != other:
            raise _malformed(
                name,
                f"{_describe(adapter, left)} and {_describe(adapter, right)}, whose inner sizes "
                f"{inner} and {other} differ",
            )
        if not inner:
            raise _malformed(name, f"{_describe(adapter, left)}, which is of rank 0")
    if len(adapter.outer) > 1:
        raise _malformed(
            name,
            f"the factors of {adapter.keys[adapter.products[0][0]]!r:.120} are of "
            f"{' and '.join(map(_times, sorted(adapter.outer)))}, which cannot be multiplied one by one",
        )


def check_values(path: str, strength: float, adapters: Iterable[tuple[object, Adapter]]):
    """Refuse values that are NaN or infinite, or too large to be multiplied, in the ``adapters`` (target,
    adapter) of the file at ``path``. Raises UnsupportedError.

    Every tensor is read once for a file, one after the other, and nothing is copied.
    """
    where = Path(path)
    stamp = where.stat()
    known = _largest_values(path, stamp.st_mtime_ns, stamp.st_size)
    for _, adapter in adapters:
        for role, key in adapter.keys.items():
            if key not in known:
                known[key] = largest(adapter.files.read(key))
            if not math.isfinite(known[key]):
                raise _malformed(where.name, f"{key!r:.120} ({role}) holds NaN or infinity")
        inner = math.prod(adapter.shape_of(left)[1] for left, _ in adapter.products)
        values = [known[adapter.keys[role]] for role in adapter.weights]
        most = abs(strength * adapter.scale) * inner * math.prod(values)
        if not most <= LARGEST:
            key = adapter.keys[adapter.weights[0]]
            raise _malformed(
                where.name,
                f"what it adds with {key!r:.120} at strength {strength:g} can be as large as {most:.1g}, "
                f"more than {LARGEST:g}",
            )


@lru_cache(FILES)
def _largest_values(path: str, changed: int, size: int) -> dict[str, float]:
    """Key -> largest magnitude, of one state of a file; who looks at a tensor puts it in."""
    return {}


def largest(x: Tensor) -> float:
    """The largest magnitude in ``x``; NaN where it holds one."""
    if not x.numel():
        return 0.0
    if not x.is_floating_point() or x.element_size() == 1:  # torch has no extremes of float8
        x = x.float()
    low, high = torch.aminmax(x)
    return max(-low.item(), high.item()) if low == low else math.nan


def _check_stored(name: str, adapter: Adapter, role: str, allowed):
    stored = adapter.files.stored(adapter.keys[role])
    if stored not in allowed:
        raise _malformed(
            name,
            f"{_describe(adapter, role)} and stored as {stored}, but {', '.join(allowed)} are what is added",
        )


def _describe(adapter: Adapter, role: str) -> str:
    return f"{adapter.keys[role]!r:.120} is of {_times(adapter.files.shapes[adapter.keys[role]])}"


def _times(shape) -> str:
    return f"shape {' x '.join(map(str, shape)) or '()'}"


def _malformed(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the LoRA {name} is malformed: {what}; download it again, or leave it out of the graph."
    )
