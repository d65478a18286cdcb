"""Where measurements and compiled blocks are cached for users whose home cannot be written."""

import logging
import os
from pathlib import Path

import pytest

from backend.client import cache_files
from backend.client.auto import measurements
from backend.client.launching.rank_environment import sanitized_environment
from backend.config import ParallelConfig


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty temporary folder, for a user whose home is a file."""
    (tmp_path / "home").write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache_files.tempfile, "gettempdir", lambda: str(tmp_path))
    cache_files._fallback.cache_clear()
    yield tmp_path
    cache_files._fallback.cache_clear()


def measure_twice(monkeypatch) -> int:
    """Count the measurements of two looks at one machine."""
    measured = []

    def measure() -> dict:
        measured.append(1)
        return {}

    for _ in range(2):
        cache_files.read_or_measure("machine", measurements._machine_key("cpu", [0]), measure, dict)
    return len(measured)


def test_a_machine_is_measured_once_where_the_cache_cannot_be_written(place, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert measure_twice(monkeypatch) == 1
    (line,) = caplog.messages
    assert "home/.cache/parallel-dit cannot be written" in line and "XDG_CACHE_HOME" in line


def test_or_where_the_disk_is_full(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache_files, "_unwritten", {})
    # what is not to be written says nothing of the disk
    cache_files.read_or_measure("machine", ["disturbed"], dict, dict, lasts=lambda found: False)
    monkeypatch.setattr(Path, "write_text", full)
    with caplog.at_level(logging.WARNING):
        assert measure_twice(monkeypatch) == 1
    assert len(caplog.messages) == 1


def test_a_user_without_a_home_starts_ranks(place, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache_files.Path, "home", homeless)
    env = sanitized_environment({}, ParallelConfig(), "cpu")
    folder = Path(env["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.parent.parent == place and folder.parent.stat().st_mode & 0o777 == 0o700
    assert env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0"  # they would be in a folder of anybody's


def test_others_cannot_write_to_the_folder(tmp_path, monkeypatch):
    """As under a umask that lets a user's group write; ranks make folders in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "parallel-dit"
    folder.mkdir()
    folder.chmod(0o775)
    assert cache_files.cache_folder() == folder and folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_not_used(place, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    (place / "parallel-dit").mkdir(mode=0o755)
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 7)
    monkeypatch.setattr(cache_files, "_private", lambda folder: folder / "private")
    theirs = real != 0  # root's folders are as good as one's own
    assert (cache_files.cache_folder() == place / "private") == theirs


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o757])
def test_root_uses_a_users_folder_that_no_other_one_writes(place, monkeypatch, mode):
    """As in a container: whoever may write there would have root run his code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    folder = place / "parallel-dit"
    folder.mkdir()
    folder.chmod(mode)
    found = os.stat_result([*folder.stat()[:4], 1234, *folder.stat()[5:10]])
    assert found.st_uid == 1234 and found.st_mode & 0o777 == mode
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(cache_files.Path, "stat", lambda *_, **__: found)
    monkeypatch.setattr(cache_files, "_private", lambda folder: folder / "private")
    assert cache_files.cache_folder() == (folder if mode == 0o755 else place / "private")


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_no_code_is_loaded_from_a_folder_that_others_can_enter(place, kind):
    theirs = place / f"{cache_files.FALLBACK}{os.getuid()}"
    if kind == "open":
        theirs.mkdir()
        theirs.chmod(0o777)
    elif kind == "link":
        (place / "target").mkdir(mode=0o700)
        theirs.symlink_to(place / "target")
    else:
        theirs.write_text("")
    found = cache_files.cache_folder()
    assert found != theirs and found == cache_files.cache_folder()
    assert found.stat().st_mode & 0o777 == 0o700


def test_the_same_folder_serves_the_next_process(place):
    first = cache_files.cache_folder()
    cache_files._fallback.cache_clear()
    assert cache_files.cache_folder() == first
