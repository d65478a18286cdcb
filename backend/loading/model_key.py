"""The name of a loaded model: a file that changes on the disk is another one. Standard library only."""

import hashlib
import json
import os
from itertools import chain
from pathlib import Path

from ..errors import UnsupportedError, quoted
from ..protocol.messages import Load

#: Files of a folder of which a transformer is loaded.
SUFFIXES = (".safetensors", ".json")
#: So much of a file is compared between machines.
HEADER_BYTES = 1 << 20


def model_key(message: Load) -> str:
    """Name what a Load loads by its fields and files. All ranks take rank 0's: inodes differ by machine."""
    path = Path(message.path).resolve()
    stamps = [[file.name, *_stamp(file)] for file in _files(path)]
    what = [str(path), message.weight_dtype, message.matmul, stamps]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def check_unchanged(message: Load, before: str):
    """Refuse a model whose key was ``before`` when this rank began to read it, and is another one now. Raises
    UnsupportedError."""
    if model_key(message) != before:
        name = quoted(Path(message.path).name)
        raise UnsupportedError(f"{name} was changed while it was read; load it again when it is complete")


def content_key(path: str) -> str:
    """Digest the sizes, first megabytes (headers) and names of a model's files, the same on every machine.
    Empty where they cannot be read."""
    digest = hashlib.sha256()
    root = Path(path)
    try:
        for file in _files(root):
            # as they are called here: what a link leads to has another name on another machine
            name = file.relative_to(root).as_posix() if file != root else ""
            with open(file, "rb") as opened:
                digest.update(f"{name} {os.fstat(opened.fileno()).st_size} ".encode())
                digest.update(opened.read(HEADER_BYTES))
    except OSError:
        return ""
    return digest.hexdigest()[:16]


def check_same(path: str, own: str, first: str):
    """Refuse a model whose ``content_key`` is another here than on rank 0's machine. Raises
    UnsupportedError."""
    # what cannot be read here is refused by the load itself, with its reason
    if own and own != first:
        name = quoted(Path(path).name)
        what = f"{name} is another file on this rank's machine than on rank 0's"
        raise UnsupportedError(f"{what}, by its size or header; copy it there")


def other_lora(paths: list[str], own: list[str], first: list[str]) -> str:
    """Say in a sentence which LoRA has another ``content_key`` than on rank 0's machine; empty: none."""
    # rank 0 alone has read the LoRAs: one that cannot be read on this machine is refused here
    found = [path for path, mine, theirs in zip(paths, own, first) if mine != theirs]
    if not found:
        return ""
    name = quoted(Path(found[0]).name)
    return f"{name} is not there, or is another file than on rank 0's machine; copy it there"


def _files(path: Path) -> list[Path]:
    """Return a file, or the weights and configurations of a folder and of its parts. Nothing of a model lies
    deeper, and of a folder with many models all names would be read."""
    if not path.is_dir():
        return [path]
    every = chain(path.glob("*"), path.glob("*/*"))
    return sorted(file for file in every if file.suffix in SUFFIXES and file.is_file())


def _stamp(file: Path) -> list[int]:
    """Return inode, size and time of change (ns) of a file."""
    try:
        found = file.stat()
    except OSError:  # it is gone: another state of it
        return []
    return [found.st_ino, found.st_size, found.st_mtime_ns]
