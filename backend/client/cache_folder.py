"""The folder of what is measured or compiled once for this machine and user."""

import logging
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

#: Name below the temporary folder; the user's number follows.
FALLBACK = "pdit-cache-"


def cache_folder() -> Path:
    """Return parallel-dit in the user's cache; where that cannot be written, a folder of temporary files that
    this user alone can enter, since code is loaded from it."""
    usual = _usual()
    if usual is not None and _is_writable(usual):
        return usual
    return _fallback(usual)


def _usual() -> Path | None:
    """Return the folder in the user's cache, None for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(root or Path.home() / ".cache") / "parallel-dit"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return None


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@cache
def _fallback(usual: Path | None) -> Path:
    """Make the folder that stands for ``usual``, and say so once."""
    folder = _private(Path(tempfile.gettempdir()))
    why = f"{usual} cannot be written" if usual else "this user has no home folder"
    text = "parallel-dit: %s, so measurements and compiled blocks are kept in %s; XDG_CACHE_HOME sets another"
    logging.warning(text + " place.", why, folder)
    return folder


def _private(place: Path) -> Path:
    """Return this user's folder in ``place``, or a new one where that name is another's."""
    if not hasattr(os, "getuid"):  # Windows, where nothing tells whose a folder is
        return Path(tempfile.mkdtemp(prefix=FALLBACK, dir=place))
    folder = place / f"{FALLBACK}{os.getuid()}"
    with suppress(FileExistsError):  # of an earlier process, or somebody else's
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if is_own and stat.S_IMODE(found.st_mode) == 0o700:
        return folder
    return Path(tempfile.mkdtemp(prefix=FALLBACK, dir=place))
