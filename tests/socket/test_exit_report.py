"""Which rank is named when a backend has ended, from what torchrun leaves."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from backend.client import exit_report
from backend.client.exit_report import cause_among, failures, full_disk
from backend.client.launching import launcher

TABLE = """\
[0]:
  time      : 2025-01-01_00:00:00
  host      : localhost
  rank      : {} (local_rank: {})
  exitcode  : {} (pid: 4242)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def leave(folder, codes, errors=(), stderr=()):
    """Write ``codes`` {rank: exit code} as torchrun's table, ``errors`` {rank: (message, seconds)} as the
    ranks' files.
    """
    (folder / "backend.log").write_text(
        "noise\n" + "".join(TABLE.format(rank, rank, code) for rank, code in codes.items())
    )
    for rank, (message, seconds) in dict(errors).items():
        place = folder / f"ranks/run_x/attempt_0/{rank}"
        place.mkdir(parents=True)
        (place / "error.json").write_text(
            json.dumps(
                {
                    "message": {
                        "message": message,
                        "extraInfo": {"py_callstack": "…", "timestamp": str(seconds)},
                    }
                }
            )
        )
    for rank, text in dict(stderr).items():
        place = folder / f"ranks/run_x/attempt_0/{rank}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "stderr.log").write_text(text)


#: stderr of a rank that NCCL's watchdog aborts.
ABORTED = """\
[rank1]:[E1125 03:20:11.5 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0 Rank 1] watchdog thread terminated
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated with exception: {}
Exception raised from ncclCommWatchdog at ProcessGroupNCCL.cpp:1902 (most recent call first):

Fatal Python error: Aborted
"""
#: As torch 2.13 and NCCL 2.27 write an error that a call returns.
NCCL_ERROR = """\
DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, \
unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
{}
"""
LOST = "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5"


@pytest.mark.parametrize(
    "codes, errors, expected",
    [
        (
            {0: -15, 1: -6},
            {1: "CUDA error: unspecified launch failure"},
            "rank 1 failed with CUDA error: unspecified launch failure",
        ),
        (
            {0: -6, 1: 1},
            {0: LOST, 1: ("OutOfMemoryError: CUDA out of memory", 5)},
            "rank 1 failed with OutOfMemoryError: CUDA out of memory",
        ),
        (
            {0: -6, 1: -6},
            {0: LOST, 1: "CUDA error: an illegal memory access"},
            "rank 1 failed with CUDA error: an illegal memory access",
        ),
        ({0: -6, 1: -15}, {}, "rank 0 was killed by SIGABRT"),
        (
            {0: 1, 1: -9},
            {0: ("RuntimeError: Connection closed by peer [127.0.0.1]:1", 5)},
            "rank 1 was killed by SIGKILL, as the system does when memory runs out",
        ),
        ({0: -15, 1: 1}, {1: ("ValueError: broken", 5)}, "rank 1 failed with ValueError: broken"),
        (
            {0: 1, 1: 1},
            {
                0: ("RuntimeError: Connection reset by peer", 4),
                1: ("OutOfMemoryError: CUDA out of memory.\nTried to allocate", 5),
            },
            "rank 1 failed with OutOfMemoryError: CUDA out of memory.",
        ),
        (
            {0: 1, 1: 1},
            {0: ("ValueError: second", 8), 1: ("ValueError: first", 7)},
            "rank 1 failed with ValueError: first",
        ),
        ({0: -11, 1: -15}, {}, "rank 0 was killed by SIGSEGV"),
        (
            {0: 1, 1: 1},
            {0: ("RuntimeError: Broken pipe", 3), 1: ("RuntimeError: Connection closed by peer", 2)},
            "rank 1 failed with RuntimeError: Connection closed by peer",
        ),
        ({2: 7}, {}, "rank 2 exited with code 7"),
        (
            {},
            {
                0: ("RuntimeError: Timed out waiting 7200000ms for recv operation to complete", 3),
                1: ("ValueError: broken", 9),
            },
            "rank 1 failed with ValueError: broken",
        ),
        (
            {0: -7, 1: 1},
            {1: ("RuntimeError: Connection closed by peer", 3)},
            "rank 0 was killed by SIGBUS, as the system does when a file is cut short while it is read, or "
            "shared memory runs out",
        ),
    ],
)
def test_cause(tmp_path, codes, errors, expected):
    """An error that is text alone is a watchdog's."""
    recorded = {rank: error for rank, error in errors.items() if isinstance(error, tuple)}
    aborted = {rank: ABORTED.format(error) for rank, error in errors.items() if isinstance(error, str)}
    leave(tmp_path, codes, recorded, aborted)
    assert str(cause_among(failures(tmp_path))) == expected


def test_a_rank_that_somebody_told_to_end(tmp_path):
    """torchrun does the same to the others, and lists them above the first."""
    others, first = TABLE.format(0, 0, -15), TABLE.format(1, 1, -15)
    heading = "Root Cause (first observed failure):\n"
    (tmp_path / "backend.log").write_text(f"Failures:\n{others}{heading}{first}")
    assert str(cause_among(failures(tmp_path))) == "rank 1 was killed by SIGTERM"


def test_last_words_of_a_rank_that_recorded_nothing(tmp_path):
    leave(
        tmp_path,
        {0: 1},
        stderr={
            0: "Traceback (most recent call last):\n  File …\n"
            "ModuleNotFoundError: No module named 'diffusers'\n\n"
        },
    )
    assert (
        str(cause_among(failures(tmp_path)))
        == "rank 0 failed with ModuleNotFoundError: No module named 'diffusers'"
    )


def test_nothing_recorded(tmp_path):
    assert cause_among(failures(tmp_path)) is None


def test_half_written_record(tmp_path):
    leave(tmp_path, {0: -9})
    place = tmp_path / "ranks/run_x/attempt_0/0"
    place.mkdir(parents=True)
    (place / "error.json").write_text('{"message": {"mess')
    assert "killed by SIGKILL" in str(cause_among(failures(tmp_path)))


@pytest.mark.parametrize(
    "error, least, hint",
    [
        ("DistBackendError: NCCL error in: ..., unhandled system error", 1 << 60, True),
        ("Error while creating shared memory segment /dev/shm/nccl-1a", 1 << 60, True),
        ("DistBackendError: NCCL error in: ..., unhandled system error", 0, False),
        ("RuntimeError: out of memory", 1 << 60, False),
    ],
)
def test_small_shared_memory_is_named_where_nccl_failed(error, least, hint, monkeypatch):
    """``least``: of bytes in /dev/shm; a container's 64 MB are below it."""
    monkeypatch.setattr(exit_report, "MIN_SHARED_MEMORY", least)
    assert ("--shm-size" in str(exit_report.RankFailure(0, 1, error))) == hint


NO_SPACE = "DistBackendError: NCCL error in: ..., unhandled system error: Error while creating shared memory "
NO_SPACE += "segment /dev/shm/nccl-KWfVyt (size 9637888), error: No space left on device (28)"


@pytest.mark.parametrize(
    "free, error, says, was_full",
    [
        (0, NO_SPACE, "has 0 of 8192 MB free", True),
        (255 << 20, NCCL_ERROR.format("Cuda failure 2"), "has 255 of 8192 MB free", True),
        (0, NCCL_ERROR.format("Cuda failure 217 'peer access is not supported'"), "", False),
        (256 << 20, NCCL_ERROR.format("Cuda failure 2"), "", False),
        (8 << 30, NO_SPACE, "was full", True),  # what failed has gone
        (0, "OSError: [Errno 28] No space left on device", "", False),  # a disk's
    ],
)
def test_shared_memory_that_files_of_others_fill_is_named(free, error, says, was_full, monkeypatch):
    """A container's size is no remedy there."""
    monkeypatch.setattr(exit_report, "SHARED_MEMORY", Path("/"))
    room = SimpleNamespace(total=8 << 30, free=free)
    monkeypatch.setattr(exit_report.shutil, "disk_usage", lambda place: room)
    text = str(exit_report.RankFailure(0, 1, error))
    assert (says in text and "nccl-* that no process uses" in text) if says else "no process" not in text
    assert "--shm-size" not in text and exit_report.was_shared_memory_full(error) == was_full


@pytest.mark.parametrize("end", ["is not supported between these two devices'", "", "of GPU 3 was lost"])
def test_peer_access_that_the_driver_refuses_is_named(end, monkeypatch):
    """As of two GeForce cards whose degrees were set by hand, so that no probe has run."""
    monkeypatch.setattr(exit_report, "MIN_SHARED_MEMORY", 0)
    error = exit_report._one_line(NCCL_ERROR.format(f"Cuda failure 217 'peer access {end}"))
    assert "ncclUnhandledCudaError" not in error  # no cause: it stands in the last line
    assert str(exit_report.RankFailure(0, 1, error)).endswith("finds another way)")
    assert "way" not in str(
        exit_report.RankFailure(0, 1, "DistBackendError: NCCL error in: ..., Cuda failure 2")
    )


def test_errors_are_read_while_processes_still_run(tmp_path, monkeypatch):
    """As where torchrun itself is stopped and does not end the others."""
    monkeypatch.setattr(launcher, "EXIT_REPORT_SECONDS", 0.1)
    process = launcher.BackendProcess.__new__(launcher.BackendProcess)
    process.folder, process.log, process.silence = tmp_path, tmp_path / "backend.log", ""
    process._private = SimpleNamespace(keep=lambda: None)
    process._link, process._ended_elsewhere, process._killed = None, False, set()
    process.machines, process._ranks = launcher.ONE_MACHINE, 2
    process._agent = subprocess.Popen(["sleep", "600"])
    try:
        assert "was lost while its processes still run" in process.failure_cause()
        leave(tmp_path, {}, {1: ("ValueError: broken", 3), 0: ("RuntimeError: Timed out waiting 1ms", 1)})
        cause = process.failure_cause()
        assert "ended because rank 1 failed with ValueError: broken. Run it again, and" in cause
        assert cause.endswith(f"; its log is {process.log}.")
    finally:
        process._agent.kill()
        process._agent.wait()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    assert full_disk(tmp_path) == ""
    usage = shutil._ntuple_diskusage(1_000_000, 1_000_000, 0)
    monkeypatch.setattr(exit_report.shutil, "disk_usage", lambda folder: usage)
    assert f"The disk of {tmp_path} is full (0 of 1,000,000 bytes free): make room there" in full_disk(
        tmp_path
    )
