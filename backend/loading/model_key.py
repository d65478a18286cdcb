"""The name of a loaded model: a file that changes on the disk is another one. Standard library only."""

import hashlib
import json
import os
from pathlib import Path

from ..errors import UnsupportedError, quoted
from ..protocol.messages import Load

#: Files of a folder of which a transformer is loaded.
SUFFIXES = (".safetensors", ".json")


def model_key(message: Load) -> str:
    """Return the name of what a Load loads, from its fields and the files' state. Rank 0's is that of all
    ranks: other machines have other inodes."""
    path = Path(message.path).resolve()
    what = [str(path), message.weight_dtype, message.matmul, _stamps(path)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def check_unchanged(message: Load, before: str):
    """Refuse a model whose key was ``before`` when this rank began to read it, and is another one now. Raises
    UnsupportedError."""
    if model_key(message) != before:
        name = quoted(Path(message.path).name)
        raise UnsupportedError(f"{name} was changed while it was read; load it again when it is complete")


def _stamps(path: Path) -> list[list]:
    """Name, inode, size and time of change (ns) of a file, or of a folder's weights and configurations."""
    files = [path]
    if path.is_dir():
        every = (Path(where, name) for where, _, names in os.walk(path) for name in names)
        files = sorted(file for file in every if file.suffix in SUFFIXES)
    return [[file.name, *_stamp(file)] for file in files]


def _stamp(file: Path) -> list[int]:
    try:
        found = file.stat()
    except OSError:  # it is gone: another state of it
        return []
    return [found.st_ino, found.st_size, found.st_mtime_ns]
