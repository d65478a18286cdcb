"""Files of JSON with what was measured of this machine, its GPUs and models, for later processes, too."""

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from ..runtime.whole_files import replace_file

#: Changes where what is written has another meaning.
VERSION = 26
#: Name below the temporary folder; the user's number follows.
FALLBACK = "pdit-cache-"

#: Where a measurement would be -> what could not be written there.
_unwritten: dict[Path, str] = {}
#: The same of what is not to outlast this process.
_passing: dict[Path, str] = {}

Measured = TypeVar("Measured")


def read_or_measure(
    kind: str,
    key: list,
    measure: Callable[[], dict],
    parse: Callable[[dict], Measured],
    lasts: Callable[[Measured], bool] = lambda measured: True,
) -> Measured:
    """Return what ``parse`` makes of the file of ``kind`` and ``key``, or of a new measurement, which is
    written where it ``lasts``, and else counts until this process ends."""
    before = read(kind, key, parse)
    if before is not None:
        return before
    measured = measure()
    parsed = parse(measured)
    if lasts(parsed):
        write(kind, key, measured)
    else:
        keep(kind, key, measured)
    return parsed


def read(kind: str, key: list, parse: Callable[[dict], Measured]) -> Measured | None:
    """Return what ``parse`` makes of the file of ``kind`` and ``key``; None where there is none of ours."""
    path = _path(kind, key)
    try:
        return parse(json.loads(_passing.get(path) or _unwritten.get(path) or path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(kind: str, key: list, measured: dict):
    """Have ``read`` find what was measured until this process ends."""
    _passing[_path(kind, key)] = json.dumps(measured)


def write(kind: str, key: list, measured: dict):
    """Write the file of ``kind`` and ``key``; what the disk does not take stays in memory."""
    path = _path(kind, key)
    written = json.dumps(measured)
    try:
        replace_file(path, written)
        _unwritten.pop(path, None)
    except OSError as error:
        if not _unwritten:
            logging.warning("parallel-dit: measurements are cached until ComfyUI ends, since %s.", error)
        _unwritten[path] = written


def _path(kind: str, key: list) -> Path:
    name = hashlib.sha256(json.dumps([VERSION, *key]).encode()).hexdigest()[:24]
    return cache_folder() / f"{kind}-{name}.json"


def cache_folder() -> Path:
    """Return parallel-dit in the user's cache; where that cannot be written or is another user's, a folder of
    temporary files that this user alone can enter, since code is loaded from it."""
    usual = _usual()
    if usual is not None and _is_usable(usual):
        return usual
    return _fallback(usual)


def _usual() -> Path | None:
    """Return the folder in the user's cache, None for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(root or Path.home() / ".cache") / "parallel-dit"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return None


def _is_usable(folder: Path) -> bool:
    """Return whether this user may write there, and no other one: code is loaded from it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    own = os.getuid() if hasattr(os, "getuid") else status.st_uid
    if status.st_uid == own:
        with suppress(OSError):  # of a disk that knows no modes
            folder.chmod(stat.S_IMODE(status.st_mode) & ~0o077)
        is_ours = True
    else:  # who is root in a container has folders of the host's users
        is_ours = 0 in (own, status.st_uid) and not status.st_mode & 0o022
    return is_ours and os.access(folder, os.W_OK | os.X_OK)


@cache
def _fallback(usual: Path | None) -> Path:
    """Make the folder that stands for ``usual``, and say so once."""
    folder = _private(Path(tempfile.gettempdir()))
    why = f"{usual} cannot be written, or is another user's" if usual else "this user has no home folder"
    text = (
        "parallel-dit: %s, so measurements and compiled blocks are in %s; XDG_CACHE_HOME sets another place."
    )
    logging.warning(text, why, folder)
    return folder


def _private(place: Path) -> Path:
    """Return this user's folder in ``place``, or a new one where that name is another's."""
    if not hasattr(os, "getuid"):  # Windows, where nothing tells whose a folder is
        return Path(tempfile.mkdtemp(prefix=FALLBACK, dir=place))
    folder = place / f"{FALLBACK}{os.getuid()}"
    with suppress(FileExistsError):  # of an earlier process, or somebody else's
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if is_own and stat.S_IMODE(status.st_mode) == 0o700:
        return folder
    return Path(tempfile.mkdtemp(prefix=FALLBACK, dir=place))
