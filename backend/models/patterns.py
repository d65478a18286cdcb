"""Names of layers, parameters and configuration entries against lists of patterns."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TypeVar

Value = TypeVar("Value")
Default = TypeVar("Default")


def matches(name: str, patterns: Collection[str]) -> bool:
    """Return whether ``name`` matches one of the ``patterns`` (fnmatch: * and ?)."""
    return bool(patterns) and _matches(name, tuple(patterns))


def first_match(name: str, values: Mapping[str, Value], default: Default) -> Value | Default:
    """Return the entry of ``values`` (pattern -> value) whose pattern is the first that ``name`` matches."""
    return next((value for pattern, value in values.items() if fnmatchcase(name, pattern)), default)


# blocks have the same names again and again
@lru_cache(maxsize=16_384)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
