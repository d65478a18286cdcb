"""Names of layers, parameters and configuration entries against lists of patterns."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Is ``name`` of one of the ``patterns``, with * and ? as in names of files?"""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
