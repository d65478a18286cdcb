"""The private folder of a launched backend: where it is made, and who removes it."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import faults
import pytest

from backend.client import status
from backend.client.launching import private_folder
from backend.client.launching.interpreter import PACK


def test_a_socket_fits_below_a_folder_whose_name_has_more_bytes_than_characters(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        place = Path(short) / ("é" * 40)
        place.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(place))
        folder = private_folder.PrivateFolder()
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder.path / "backend.sock"))
        finally:
            folder.close()


@pytest.mark.parametrize("lacks", ["sockets", "modes"])
def test_a_disk_without_sockets_or_modes_is_passed_over(lacks, monkeypatch, tmp_path):
    """As TMPDIR is on /mnt/c under WSL, or on a USB stick."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Refusing(socket.socket):
        def bind(self, address):
            if address.startswith(str(tmp_path)):
                raise PermissionError(errno.EPERM, "Operation not permitted")
            super().bind(address)

    def made_for_all(prefix, dir=str(tmp_path)):
        folder = make(prefix=prefix, dir=dir)
        if dir == str(tmp_path):
            os.chmod(folder, 0o777)
        return folder

    make = tempfile.mkdtemp
    if lacks == "sockets":
        monkeypatch.setattr(private_folder.socket, "socket", Refusing)
    else:
        monkeypatch.setattr(private_folder.tempfile, "mkdtemp", made_for_all)
    folder = private_folder.PrivateFolder()
    assert folder.path.parent == Path("/tmp") and stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert not list(tmp_path.iterdir())
    folder.close()


def test_a_disk_that_groups_share_is_fine(monkeypatch, tmp_path):
    """Folders in a folder with set-group-ID have it, too."""
    tmp_path.chmod(0o2770)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = private_folder.PrivateFolder()
    assert folder.path.parent == tmp_path and stat.S_IMODE(folder.path.stat().st_mode) == 0o2700
    folder.close()


#: A launcher that says its folder and waits for its death; ``named`` has it name its log first.
LAUNCHER = """
import sys; sys.path.insert(0, {root!r})
import time
from backend.client.launching.private_folder import PrivateFolder
folder = PrivateFolder()
if {named}: folder.keep()
print(folder.path, flush=True)
time.sleep(600)
"""


@contextmanager
def waiting_launcher(place: Path, named: bool = False) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A process with a private folder in ``place``, killed in the end."""
    code = LAUNCHER.format(root=str(PACK), named=named)
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_folder_of_a_killed_launcher_is_removed(tmp_path, end):
    with waiting_launcher(tmp_path) as (process, folder):
        assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "ranks").mkdir()
        private_folder.sweep(tmp_path)
        assert (folder / "ranks").exists()  # it lives
        process.send_signal(end)
        process.wait()
        private_folder.sweep(tmp_path)
        assert not folder.exists()


def test_a_log_that_was_named_stays_for_a_day(tmp_path):
    with waiting_launcher(tmp_path, named=True) as (process, folder):
        process.kill()
        process.wait()
        private_folder.sweep(tmp_path)
        assert folder.exists()
        yesterday = time.time() - private_folder.KEEP_SECONDS - 60
        os.utime(folder / private_folder.LOCK, (yesterday, yesterday))
        private_folder.sweep(tmp_path)
        assert not folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_log_is_named_on_a_full_disk(tmp_path, monkeypatch):
    with faults.small_disk(tmp_path / "disk") as place:
        monkeypatch.setattr("tempfile.tempdir", str(place))
        folder = private_folder.PrivateFolder()
        faults.fill(place)
        folder.keep()
        folder.close()
        private_folder.sweep(place)
        assert (folder.path / private_folder.LOCK).stat().st_size > 0


def test_a_log_is_named_on_a_disk_that_takes_nothing_any_more(tmp_path, monkeypatch):
    """As after an error of the disk, of which a rank has died: that is what is to be said."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = private_folder.PrivateFolder()

    def utime(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as disk:
        disk.setattr(os, "utime", utime)
        folder.keep()
    folder.close()
    assert folder.path.exists()


def test_a_log_may_be_named_while_another_thread_closes_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = private_folder.PrivateFolder()
    folder._lock.close()
    folder.keep()
    folder.close()
    assert folder.path.exists()


def test_the_lock_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        folder = private_folder.PrivateFolder()
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder.path / private_folder.LOCK).stat().st_mode) == 0o600
    folder.close()


def test_a_folder_is_made_though_it_cannot_be_held_open(tmp_path, monkeypatch):
    """As of a process with many files: that keeps a cleaner out, and no more."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opened = os.open

    def limited(path, flags, *arguments, **named):
        if flags == os.O_RDONLY:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, flags, *arguments, **named)

    with monkeypatch.context() as files:
        files.setattr(os, "open", limited)
        folder = private_folder.PrivateFolder()
    folder.close()
    assert not folder.path.exists()


def test_folders_that_are_not_a_dead_launchers_stay(tmp_path):
    """Another user's, one that others can enter, a link, a linked lock, one without a lock."""
    place = tmp_path / "place"
    outside = tmp_path / "outside"
    for folder in (place, outside, *(place / f"parallel-dit-{name}" for name in ("open", "none", "lock"))):
        folder.mkdir(mode=0o700)
    (place / "parallel-dit-open").chmod(0o755)
    for folder in (outside, place / "parallel-dit-open"):
        (folder / private_folder.LOCK).touch()
    (place / "parallel-dit-link").symlink_to(outside)
    (place / "parallel-dit-lock" / private_folder.LOCK).symlink_to(outside / private_folder.LOCK)
    (place / "parallel-dit-file").touch()
    before = sorted(place.iterdir())
    private_folder.sweep(place)
    assert sorted(place.iterdir()) == before and (outside / private_folder.LOCK).exists()


def test_a_folder_of_another_user_stays(tmp_path, monkeypatch):
    folder = tmp_path / "parallel-dit-x"
    folder.mkdir(mode=0o700)
    (folder / private_folder.LOCK).touch()
    own = os.getuid()
    monkeypatch.setattr(private_folder.os, "getuid", lambda: own + 1)
    private_folder.sweep(tmp_path)
    assert folder.exists()
    monkeypatch.undo()
    private_folder.sweep(tmp_path)
    assert not folder.exists()


@pytest.mark.parametrize("end", ["closed", "swept"])
def test_the_log_of_a_removed_folder_is_forgotten(tmp_path, monkeypatch, end):
    """Another user may make a folder of its name in /tmp, with a file of ours as its log."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(private_folder, "LOGS", logs := deque([Path("/x/backend.log")], maxlen=8))
    folder = private_folder.PrivateFolder()
    logs.append(folder.path / "backend.log")
    if end == "closed":
        folder.close()
    else:
        folder.keep()
        folder.close()
        assert len(logs) == 2  # it is named, and stays
        yesterday = time.time() - private_folder.KEEP_SECONDS - 60
        os.utime(folder.path / private_folder.LOCK, (yesterday, yesterday))
        private_folder.sweep(tmp_path)
    assert list(logs) == [Path("/x/backend.log")]


@pytest.mark.parametrize("kind", ["text", "long", "open", "linked", "link", "fifo", "endless"])
def test_a_log_is_a_file_of_a_folder_that_is_ours_alone(tmp_path, kind, monkeypatch):
    """Anything else is another user's, who may want to read our files, or to have us wait."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = tmp_path / "parallel-dit-x"
    folder.mkdir(mode=0o700)
    log = folder / "backend.log"
    if kind == "link":
        log.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(log)
    elif kind == "endless":
        log.symlink_to("/dev/zero")
    else:
        log.write_text("a" * status.LOG_BYTES + "end" if kind == "long" else "end")
    if kind == "open":
        folder.chmod(0o755)
    if kind == "linked":
        (tmp_path / "link").symlink_to(folder)
        log = tmp_path / "link" / "backend.log"
    monkeypatch.setattr(status, "LOGS", [log])
    found = status.log_of_last_backend()
    assert found[-3:] == ("end" if kind in ("text", "long") else "")
    assert len(found) == {"text": 3, "long": status.LOG_BYTES}.get(kind, 0)
