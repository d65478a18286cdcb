"""Names of layers, parameters and configuration entries against lists of patterns."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import lru_cache


def matches(name: str, patterns: Collection[str]) -> bool:
    """Return whether ``name`` matches one of the ``patterns`` (fnmatch: * and ?)."""
    return bool(patterns) and _matches(name, tuple(patterns))


# blocks have the same names again and again
@lru_cache(maxsize=16_384)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
