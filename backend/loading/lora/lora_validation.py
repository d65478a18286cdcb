"""Checks a LoRA file before any rank adds it: shapes that multiply, an alpha that is one number, and finite
values. Rank 0 alone checks, when a client names the file: on the ranks an error of one would end all."""

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from ...errors import UnsupportedError
from ..files.regular_files import file_state
from ..files.safetensors_files import FLOATING, largest
from .adapters import Adapter

#: Stored types of an alpha that is an integer.
INTEGERS = ("I64", "I32", "I16", "I8", "U8")
#: Most that an adapter may add to a weight: float32 holds it with room to spare.
MAX_ADDED = 1e30
#: Files whose largest values are cached.
FILES = 64


def check_form(name: str, adapter: Adapter):
    """Refuse an adapter of the file ``name`` whose shapes or types are wrong. Raises UnsupportedError."""
    for role, key in adapter.keys.items():
        allowed = (*FLOATING, *INTEGERS) if role == "alpha" else FLOATING
        stored = adapter.files.stored_dtype(key)
        if stored not in allowed:
            what = f"stored as {stored}, but {', '.join(allowed)} are what is added"
            raise _malformed(name, f"{_describe(adapter, role)} and {what}")
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
            both = f"{_describe(adapter, left)} and {_describe(adapter, right)}"
            raise _malformed(name, f"{both}, whose inner sizes {inner} and {other} differ")
        if not inner:
            raise _malformed(name, f"{_describe(adapter, left)}, which is of rank 0")
    if len(adapter.elementwise_sizes) > 1:
        key = adapter.keys[adapter.products[0][0]]
        sizes = " and ".join(map(_shape_words, sorted(adapter.elementwise_sizes)))
        what = f"the factors of {key!r:.120} are of {sizes}, which cannot be multiplied one by one"
        raise _malformed(name, what)


def check_values(path: str, strength: float, adapters: Iterable[tuple[object, Adapter]]):
    """Refuse values that are NaN, infinite or too large to be multiplied in the ``adapters`` (target,
    adapter) of the file at ``path``, each tensor of which is read once. Raises UnsupportedError."""
    where = Path(path)
    known = _largest_values(path, file_state(where))
    for _, adapter in adapters:
        for role, key in adapter.keys.items():
            if key not in known:
                known[key] = largest(adapter.files.read(key))
            if not math.isfinite(known[key]):
                raise _malformed(where.name, f"{key!r:.120} ({role}) holds NaN or infinity")
        inner = math.prod(adapter.shape_of(left)[1] for left, _ in adapter.products)
        values = [known[adapter.keys[role]] for role in adapter.weights]
        most = abs(strength * adapter.scale) * inner * math.prod(values)
        if not most <= MAX_ADDED:
            key = adapter.keys[adapter.weights[0]]
            what = f"what it adds with {key!r:.120} at strength {strength:g} can be as large as {most:.1g}"
            raise _malformed(where.name, f"{what}, more than {MAX_ADDED:g}")


@lru_cache(FILES)
def _largest_values(path: str, state: tuple[int, ...]) -> dict[str, float]:
    """Return key -> largest magnitude of one state of a file, to be filled by the caller."""
    return {}


def _describe(adapter: Adapter, role: str) -> str:
    return f"{adapter.keys[role]!r:.120} is of {_shape_words(adapter.files.shapes[adapter.keys[role]])}"


def _shape_words(shape) -> str:
    return f"shape {' x '.join(map(str, shape)) or '()'}"


def _malformed(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the LoRA {name} is malformed: {what}; download it again, or leave it out of the graph."
    )
