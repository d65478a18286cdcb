"""What was measured of this machine, its GPUs and models: files of JSON in the cache folder, which later
processes read too."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .cache_folder import cache_folder

#: Changes where what is written has another meaning.
VERSION = 15

#: Where a measurement would be -> what could not be written there.
_unwritten: dict[Path, str] = {}

Measured = TypeVar("Measured")


def read_or_measure(
    kind: str, key: list, measure: Callable[[], dict], parse: Callable[[dict], Measured]
) -> Measured:
    """Return what ``parse`` makes of the file of ``kind`` and ``key``, or of a new measurement, which is
    written."""
    before = read(kind, key, parse)
    if before is not None:
        return before
    found = measure()
    write(kind, key, found)
    return parse(found)


def read(kind: str, key: list, parse: Callable[[dict], Measured]) -> Measured | None:
    """Return what ``parse`` makes of the file of ``kind`` and ``key``; None where there is none, or it is not
    ours."""
    path = _path(kind, key)
    try:
        return parse(json.loads(_unwritten.get(path) or path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write(kind: str, key: list, found: dict):
    """Write ``found`` to the file of ``kind`` and ``key``; where the disk takes nothing, keep it until this
    process ends."""
    path = _path(kind, key)
    written = json.dumps(found)
    try:
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(written)
        new.replace(path)
        _unwritten.pop(path, None)
    except OSError as error:
        if not _unwritten:
            logging.warning("parallel-dit: measurements are kept until ComfyUI ends, since %s.", error)
        _unwritten[path] = written


def _path(kind: str, key: list) -> Path:
    name = hashlib.sha256(json.dumps([VERSION, *key]).encode()).hexdigest()[:24]
    return cache_folder() / f"{kind}-{name}.json"
