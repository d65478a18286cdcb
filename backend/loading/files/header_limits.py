"""Limits of the files that others have made: what their headers claim is checked before anything is read, so
that no file holds a rank up or fills its memory."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

from ...errors import UnsupportedError, quoted
from .allowed_folders import ANYWHERE, Folders
from .regular_files import MAX_HEADER_BYTES, open_regular, read_json

#: Tensors of a checkpoint; published ones have thousands, with scales about fifteen thousand.
MAX_TENSORS = 32_768
#: Files of a folder, and bytes of their index, which names every tensor.
MAX_SHARDS = 1_024
MAX_INDEX_BYTES = 16 << 20
#: Bytes that show what a file is.
START_BYTES = 64
#: How other files begin that are saved under the name of a safetensors file, in lower case -> what they are
#: -> what to do.
OTHER_KINDS = (
    ((b"<!doctype", b"<html", b"<?xml"), "a web page", "download the file itself, signed in if need be"),
    (
        (b"version https://git-lfs",),
        "a Git LFS pointer, which stands for the file",
        "run git lfs pull in its folder, or download the file itself",
    ),
    (
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"pk\x03\x04"),
        "a pickle of PyTorch (.pt, .ckpt, .bin) or a zip archive",
        "convert it, since such files can run code when they are opened",
    ),
    ((b"gguf",), "a GGUF file", "name it .gguf"),
)
#: Highest number of a block; published models have up to about a hundred.
HIGHEST_BLOCK = 4_095
#: Parts of a name between dots; published ones have up to about ten.
MAX_NAME_PARTS = 32


def check_header_sizes(paths: Iterable[Path]):
    """Refuse files that are no safetensors, or have too large headers. Raises UnsupportedError."""
    total = tensors = 0
    for path in paths:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = int.from_bytes(file.read(8), "little")
            # sooner than by parsing; who writes it in another way is found by check_names
            tensors += file.read(min(header, MAX_HEADER_BYTES)).count(b'"data_offsets"')
            file.seek(0)
            start = file.read(START_BYTES)
        if size < 8 or header > size - 8:
            _refuse_other_kinds(path.name, start)
            why = f"its header would have {header:,} bytes and the file has {size:,}"
            raise unreadable(path.name, kind="safetensors", why=why)
        total += header
        if total > MAX_HEADER_BYTES:
            raise UnsupportedError(
                f"{quoted(path.name)} has a header of {header:,} bytes; all of a model's headers have "
                f"{MAX_HEADER_BYTES:,} at most, so this is no diffusion transformer: use another file."
            )
        if tensors > MAX_TENSORS:
            raise _many(path.name, tensors)


def _refuse_other_kinds(name: str, start: bytes):
    """Say what a file is that begins with ``start`` and is no safetensors. Raises UnsupportedError."""
    for beginnings, what, remedy in OTHER_KINDS:
        if start.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(beginnings):
            raise UnsupportedError(f"{quoted(name)} is {what} and no safetensors file; {remedy}.")


def check_names(name: str, keys: Mapping[str, object]):
    """Refuse too many tensors, too long names or too high block numbers, which become loops."""
    if len(keys) > MAX_TENSORS:
        raise _many(name, len(keys))
    for key in keys:
        why = ""
        if key.count(".") >= MAX_NAME_PARTS:
            why = f"more than {MAX_NAME_PARTS} parts"
        elif high := [word for word in key.split(".") if _is_high(word)]:
            why = f"block {quoted(high[0], 20)}, and blocks are numbered up to {HIGHEST_BLOCK:,} at most"
        if why:
            what = f"{quoted(name)} has a tensor {quoted(key)} of {why}"
            raise UnsupportedError(f"{what}; the file was made badly: use another one.")


def unreadable(name: str, kind: str, why: str) -> UnsupportedError:
    """Return the refusal of a file that is no file of this kind, or damaged."""
    what = f"{quoted(name)} cannot be read as {kind} ({why})"
    return UnsupportedError(f"{what}; it is truncated or no {kind} file: download it again.")


def _many(name: str, count: int) -> UnsupportedError:
    return UnsupportedError(
        f"{quoted(name)} has {count:,} tensors, and a transformer {MAX_TENSORS:,} at most; use another file."
    )


def _is_high(word: str) -> bool:
    digits = word.lstrip("0")
    return is_number(word) and (len(digits) > 4 or int(digits or 0) > HIGHEST_BLOCK)


def is_number(word: str) -> bool:
    """Return whether a part of a name is the number of a block, in ASCII digits alone."""
    return word.isascii() and word.isdecimal()


def shards(index: Path, folders: Folders = ANYWHERE) -> list[Path]:
    """Return the files that an index of shards names, in its own folder. Raises UnsupportedError."""
    weights = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    names = set()
    if isinstance(weights, dict) and all(isinstance(name, str) for name in weights.values()):
        names = set(weights.values())
    if not 0 < len(names) <= MAX_SHARDS:
        what = f"{quoted(index.name)} has no weight_map that names the files of its tensors"
        raise UnsupportedError(f"{what}, {MAX_SHARDS:,} at most; download it again.")
    return [_next_to(index, name, folders) for name in sorted(names)]


def _next_to(index: Path, name: str, folders: Folders) -> Path:
    """Return the file ``name`` of an index. A name may not leave the folder; a link there may lead to the
    model's folder, its blobs in Hugging Face's cache, or a folder that was allowed."""
    parts = PurePath(name).parts
    if not parts or "\0" in name or ".." in parts or PurePath(name).is_absolute():
        what = f"{quoted(index.name)} names the file {quoted(name)}"
        raise UnsupportedError(f"{what}, which is not in its folder; download the model again.")
    path = index.parent / name
    folder = os.path.realpath(index.parent)
    real = Path(os.path.realpath(path))
    homes = [folder, _cached(PurePath(folder)), _cached(PurePath(os.path.abspath(index.parent)))]
    if not any(home and real.is_relative_to(home) for home in homes) and not folders.holds(real):
        what = f"{quoted(index.name)} names {quoted(name)}, a link that leads out of the model's folder"
        raise UnsupportedError(f"{what}; put the file itself there, or a link to a folder of models.")
    return path


def _cached(folder: PurePath) -> str | None:
    """Return the blobs of a folder in Hugging Face's cache: models--OWNER--NAME/snapshots/REVISION/..."""
    for above in folder.parents:
        if above.name == "snapshots" and above.parent.name.startswith("models--"):
            return os.path.realpath(above.parent / "blobs")
    return None
