"""The fast tier of tests, and what it leaves out for ``--all``."""

from collections.abc import Iterable
from pathlib import Path

import pytest


def params(runs: Iterable) -> list:
    """Runs of a rank program as parameters: each with its id, and marked ``full`` where the fast tier leaves
    it out."""
    return [pytest.param(run, id=run.id, marks=() if run.is_fast else pytest.mark.full) for run in runs]


def fast(values: Iterable, chosen: Iterable) -> list:
    """Parameters of which the fast tier takes ``chosen`` alone."""
    chosen = list(chosen)
    return [pytest.param(value, marks=() if value in chosen else pytest.mark.full) for value in values]


def is_full(item) -> bool:
    """Does the test run under --all alone?"""
    return item.get_closest_marker("full") is not None


def is_named(item) -> bool:
    """Is the test asked for by its id, of a file's tests or of one's parameters?"""
    named = [Path(path).name + "::" + name for path, _, name in _arguments(item.config) if name]
    own = item.nodeid.rpartition("/")[2]
    return any(own == name or own.startswith((f"{name}[", f"{name}::")) for name in named)


def _arguments(config) -> list[tuple[str, str, str]]:
    return [argument.partition("::") for argument in config.args]
