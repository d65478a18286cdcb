"""Room on the disk and in host memory for each file of scripts/doctor.py --full, asked for as it is made."""

import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import safetensors.torch
from doctor_findings import NoRoomError, gb

from backend.hardware.device_memory import host_free
from backend.hardware.host_system import is_wsl

#: Bytes that stay free for logs and what else is written meanwhile.
SPARE = 200_000_000
#: Most bytes of a value in a quantized file, its scales and layers that stay bf16 among them.
MAX_BYTES = {"bf16": 2.05, "nvfp4": 0.9, "Q4_K": 0.9}
MAX_BYTES_OTHERS = 1.4
#: Most bytes of a quantized copy for each of a bf16 model, and of what making it holds besides.
MAX_COPY = 0.7
HELD_OF_COPY = 0.4
#: Bytes of host memory for each of a file that is made, at most (1.06 of a model was measured), and twice as
#: many where safetensors copies every tensor before it writes.
HOST = 2.1 if hasattr(safetensors.torch, "_tobytes") else 1.1
#: Bytes of host memory that stay free, for ranks that start meanwhile.
HOST_SPARE = 10**9
#: File systems that keep their files in memory.
IN_MEMORY = ("tmpfs", "ramfs")
#: What helps where the host has too little memory.
MORE_MEMORY = "close other programs"
MORE_FOR_WSL = ", or give WSL more in .wslconfig (docs/faq.md, WSL and Windows)"


def quantized_bytes(kind: str, width: int) -> int:
    """Return the most bytes of a file of doctor_files.py."""
    return int(weights_bytes(width) / 2 * MAX_BYTES.get(kind, MAX_BYTES_OTHERS))


def weights_bytes(width: int) -> int:
    """Return the bytes of the bf16 weights that those files are made of."""
    import memory

    return 2 * sum(math.prod(shape) for shape in memory.shapes(width).values())


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


def need_host(size: int, held: int, what: str, folder: Path):
    """Raise NoRoomError where host memory has no room for making a file of so many bytes with so many
    ``held`` besides, and for the file itself where ``folder`` lies in memory."""
    needed = int(HOST * (size + held)) + HOST_SPARE + size * lies_in_memory(folder)
    free = host_free(swap=False)
    if free < needed:
        text = f"{gb(free)} of host memory are free, and making {what} needs {gb(needed)}"
        raise NoRoomError(f"{text}; {more_memory()}")


def more_memory() -> str:
    """Say what helps where the host has too little memory."""
    return MORE_MEMORY + (MORE_FOR_WSL if is_wsl() else "")


def lies_in_memory(folder: Path) -> bool:
    """Return whether files in a folder take memory instead of a disk."""
    kinds = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    places = (folder.resolve(), *folder.resolve().parents)
    kind = next((kinds[str(place)] for place in places if str(place) in kinds), "")
    return kind in IN_MEMORY


def delete(path: Path):
    """Delete a file, or a model's folder. What cannot go stays until the end: on NFS a mapped file gets
    another name, and its folder is not empty."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()
