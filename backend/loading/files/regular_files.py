"""Opening what others have put on the disk: regular files alone, of bounded size. Standard library only."""

import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ...errors import UnsupportedError, quoted, reason

#: Bytes of a configuration; published ones have a few thousand.
MAX_CONFIG_BYTES = 1 << 20
#: Bytes of the headers of all files of a model; published ones have about one MB, LoRAs a few.
MAX_HEADER_BYTES = 16 << 20
#: Where a pipeline's folder says of which class it is: a DiffusionPipeline's, a ModularPipeline's.
INDEXES = ("model_index.json", "modular_model_index.json")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises UnsupportedError for a pipe, which may wait, or an endless device."""
    try:
        # without waiting; the open file is checked, which nobody can exchange any more
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"{quoted(path.name)} cannot be opened ({reason(error)}); check that it is there, and "
            f"its permissions."
        ) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise not_regular(path)
    return os.fdopen(handle, "rb")


def file_state(path: Path) -> tuple[int, ...]:
    """Return what changes with a file, its size and time of change (ns); empty where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return ()
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else ()


def not_regular(path: Path) -> UnsupportedError:
    """Return the refusal of what is there but has no bytes of its own."""
    what = f"{quoted(path.name)} is not a regular file but a folder, pipe, socket or device"
    return UnsupportedError(f"{what}; choose a model's file.")


def check_regular(folder: Path):
    """Refuse a folder with pipes, sockets or devices, which a library would open."""
    for where, _, names in os.walk(folder):
        for name in names:
            if not stat.S_ISREG(os.stat(os.path.join(where, name)).st_mode):
                raise UnsupportedError(f"{quoted(name)} is a pipe, socket or device; delete it.")


def is_pipeline(folder: Path) -> bool:
    """Return whether ``folder`` is a diffusers DiffusionPipeline's or ModularPipeline's."""
    return any((folder / name).is_file() for name in INDEXES)


def read_json(path: Path, most: int = MAX_CONFIG_BYTES) -> dict:
    """Return the object in a JSON file of at most ``most`` bytes. Raises UnsupportedError."""
    with open_regular(path) as file:
        text = file.read(most + 1)
    if len(text) > most:
        what = f"{_with_folders(path)} has more than {most:,} bytes"
        raise UnsupportedError(f"{what}, which no configuration needs; download it again.")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"{_with_folders(path)} is no JSON ({reason(error)})"
        raise UnsupportedError(f"{why}; download it again.") from None
    if not isinstance(parsed, dict):
        raise UnsupportedError(
            f"{_with_folders(path)} holds {quoted(parsed)} and no names; download it again."
        )
    return parsed


def _with_folders(path: Path) -> str:
    """Write the end of a path for a message: every model's configuration has the same name."""
    return quoted("/".join(path.parts[-3:]), 160)
