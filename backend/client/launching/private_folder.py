"""The private folder of a launched backend: its socket, its logs, and the files in which its ranks meet. The
launcher removes it when it ends, unless a message named its log; if it was killed, the next launcher does.

The launcher holds a lock (flock) on a file in the folder, and its agent inherits the lock. The agent outlives
a killed launcher until it has ended its ranks. The system releases the lock when both have ended, however
they end. So a folder whose lock is free is abandoned. The lock file is empty, or has one byte: then a message
named the log, and the folder stays for KEEP_SECONDS.
"""

import errno
import os
import shutil
import socket
import stat
import tempfile
import time
from collections import deque
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path

from ...protocol import BackendError
from . import fork_guard

try:
    import fcntl
except ImportError:  # Windows, where no folder is locked and none is swept
    fcntl = None

PREFIX = "parallel-dit-"
LOCK = "launcher.lock"
#: How long a folder stays whose log was named in a message.
KEEP_SECONDS = 24 * 3600.0
#: Logs of the last backends that this process has started, the newest last, until their folders are removed:
#: in /tmp anybody may make a folder of that name afterwards.
LOGS: deque[Path] = deque(maxlen=8)
#: Bytes of the longest path that every system takes for a unix socket.
_MAX_SOCKET_PATH = 100
#: Where the usual place for temporary files has too long a path, or no modes and sockets (/mnt/c under WSL,
#: exFAT, CIFS).
_SHORT = "/tmp"


class PrivateFolder:
    """A new folder that only this user can enter, with a path short enough for a socket unless ``sockets`` is
    false: large files belong on the disk that TMPDIR names, whatever its path."""

    def __init__(self, sockets: bool = True):
        for place in {tempfile.gettempdir(), _SHORT}:
            sweep(Path(place))
        folder = tempfile.mkdtemp(prefix=PREFIX)
        if sockets and not _takes_sockets(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=_SHORT)
        self.path = Path(folder)
        try:
            self._lock = _locked(self.path)
            self._open = _held_open(self.path)
        except OSError:  # the disk is full
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._owner = os.getpid()
        if self._lock is not None:
            # a fork may keep the open folder: all that its copy does is to keep systemd's cleaner out
            fork_guard.hold(self._lock)
        self._stays = False

    def keep(self):
        """Keep the folder for KEEP_SECONDS from now on: its log was named to somebody."""
        self._stays = True
        if self._lock is not None:
            # of a disk that can no longer be written what has failed is still to be told; ValueError: another
            # thread has closed the folder meanwhile
            with suppress(OSError, ValueError):
                self._lock.truncate(1)  # a hole, for which a full disk has room, too
                os.utime(self._lock.fileno())

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors with which a process holds the folder, too (Popen's pass_fds)."""
        return () if self._lock is None else (self._lock.fileno(),)

    def close(self):
        """Remove the folder, or leave a marked one to ``sweep``. More than once is fine; a fork of its
        process leaves it."""
        if os.getpid() != self._owner:
            return
        if not self._stays:
            _remove(self.path)
        if self._lock is not None:
            self._lock.close()
        if self._open is not None:
            os.close(self._open)
        self._lock = self._open = None


def private_folder(sockets: bool = True) -> PrivateFolder:
    """Return a new folder (PrivateFolder). Raises BackendError where the disk has no room for one."""
    try:
        return PrivateFolder(sockets)
    except OSError as error:
        place = tempfile.gettempdir()
        files = "the backend's socket and logs" if sockets else "files"
        what = f"No folder for {files} can be made in {place} ({error})"
        raise BackendError(f"{what}; make room there, or set TMPDIR to another folder.") from error


def _takes_sockets(folder: str) -> bool:
    """Return whether a socket in ``folder`` has a path that fits, and is out of others' reach."""
    probe = f"{folder}/backend.sock"
    if len(os.fsencode(probe)) > _MAX_SOCKET_PATH:
        return False
    if fcntl is None:
        return True
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(probe)
        os.unlink(probe)
    except OSError as error:
        return error.errno == errno.ENOSPC  # which is said of this disk, and not passed over
    return not stat.S_IMODE(os.stat(folder).st_mode) & 0o077  # set-group-ID may have come from its parent


def _locked(folder: Path) -> FileIO | None:
    """Return the open lock file of our folder, which is locked before anybody can see it under its name."""
    if fcntl is None:
        return None
    new = folder / f"{LOCK}.new"
    lock = FileIO(new, "x+", opener=partial(os.open, mode=0o600))
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(new, folder / LOCK)
    return lock


def _held_open(folder: Path) -> int | None:
    """Return the open folder with a shared lock, by which systemd's cleaner of temporary files (tmpfiles.d)
    leaves it and all that is in it; None where it takes none, as on NFS."""
    if fcntl is None:
        return None
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is a comfort
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def sweep(place: Path):
    """Remove the folders in ``place`` that launchers of this user have left. Others' folders, links, folders
    without a lock and those that ``keep`` has marked stay."""
    if fcntl is None:
        return
    try:
        names = [name for name in os.listdir(place) if name.startswith(PREFIX)]
    except OSError:  # there is no such place, or it is not ours to read
        return
    for name in names:
        _remove_abandoned(place / name)


def _remove_abandoned(folder: Path):
    assert fcntl is not None
    try:
        lock = open_within(folder, LOCK, os.O_RDWR)
    except OSError:  # a link, a file, another user's, gone by now, or a folder that no launcher has made
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(lock)
        if not status.st_size or time.time() - status.st_mtime > KEEP_SECONDS:
            _remove(folder)
    except OSError:
        pass  # its launcher holds the lock
    finally:
        os.close(lock)


def _remove(folder: Path):
    """Remove a folder, after which its log is asked for no more."""
    # IndexError: another thread adds one meanwhile, and the next look at the log finds nothing
    with suppress(ValueError, IndexError):
        LOGS.remove(folder / "backend.log")
    shutil.rmtree(folder, ignore_errors=True)


def open_within(folder: Path, name: str, flags: int) -> int:
    """Open a file of a folder that this user alone can enter. Raises OSError where the folder is another's,
    one of both is a link, or nothing is there."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(inside)
        if found.st_uid != os.getuid() or found.st_mode & 0o777 != 0o700:
            raise PermissionError(errno.EACCES, "it is not this user's alone", str(folder))
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    finally:
        os.close(inside)
