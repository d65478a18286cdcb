"""Room on the disk for each file of scripts/doctor.py --full, asked for as the file is made."""

import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from doctor_findings import NoRoomError, gb

#: Bytes that stay free for logs and what else is written meanwhile.
SPARE = 200_000_000
#: Most bytes of a value in a quantized file, its scales and layers that stay bf16 among them.
MAX_BYTES = {"bf16": 2.05, "nvfp4": 0.9, "Q4_K": 0.9}
MAX_BYTES_OTHERS = 1.4
#: Most bytes of a quantized copy for each of a bf16 model.
MAX_COPY = 0.7


def quantized_bytes(kind: str, width: int) -> int:
    """Return the most bytes of a file of doctor_files.py."""
    import memory

    values = sum(math.prod(shape) for shape in memory.shapes(width).values())
    return int(values * MAX_BYTES.get(kind, MAX_BYTES_OTHERS))


def stored_bytes(path: Path) -> int:
    """Return the bytes of a model's file, or of all files of its folder."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


def model_bytes(cls: Callable, arguments: dict, bytes_of_value: int) -> int:
    """Return the bytes of a model's weights, without making them."""
    import torch

    with torch.device("meta"):
        model = cls(**arguments)
    return bytes_of_value * sum(each.numel() for each in model.parameters())


def need_disk(size: int, what: str, folder: Path, release: Callable[[], None]):
    """Raise NoRoomError where ``folder`` has no room for a file; ``what``: in words. ``release``: ends the
    ranks, whose mapped files take room though they are deleted."""
    if shutil.disk_usage(folder).free < size + SPARE:
        release()
    free = shutil.disk_usage(folder).free
    if free < size + SPARE:
        lacking = f"{gb(free)} are free in {folder.parent}, and {what} needs {gb(size + SPARE)}"
        raise NoRoomError(f"{lacking}; make room, or set TMPDIR to a larger disk")


def delete(path: Path):
    """Delete a file, or a model's folder. What cannot go stays until the end: on NFS a mapped file gets
    another name, and its folder is not empty."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()
