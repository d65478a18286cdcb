"""Which processes are found silent by their heartbeats: real ones, without ranks' work."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from backend.client import silence
from backend.client.launching import launcher
from backend.client.launching.launcher import BackendProcess
from backend.client.silence import LOOK_SECONDS, SilenceWatch, silent_seconds
from backend.client.step_timer import COMPILED_SECONDS
from backend.config import ConfigError, ParallelConfig
from backend.protocol.heartbeats import BEAT_SECONDS, Beat, Heartbeats
from backend.runtime.parent_pipe import signals_the_end_alone

#: A rank that beats and does ``what``.
RANK = """
import ctypes, sys, time; sys.path.insert(0, {root!r})
from backend.protocol.heartbeats import Heartbeats
Heartbeats.join({path!r}).start({rank}, {rank})
print("begun", flush=True)
{what}
"""
#: One that was told what to do, and holds the GIL.
TOLD = """
import ctypes, os, sys; sys.path.insert(0, {root!r})
from backend.runtime.parent_pipe import be_killed_with_parent
os.read(0, 1)
be_killed_with_parent()
print("begun", flush=True)
ctypes.PyDLL(None).sleep(60)
"""
#: Several beats and looks.
LIMIT = 3.0
SOON = 30


class Ranks:
    """Processes that beat, and the watch over them; ``reports`` holds what it has reported."""

    def __init__(self, folder: Path, whats: list[str]):
        self.beats = Heartbeats.make(len(whats), folder)
        root = str(Path(__file__).parents[2])
        codes = (RANK.format(root=root, path=self.beats.path, rank=i, what=w) for i, w in enumerate(whats))
        commands = [[sys.executable, "-c", code] for code in codes]
        self.processes = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
        for process in self.processes:
            assert process.stdout.readline() == "begun\n"
        self.reports = []
        self.watch = SilenceWatch(self.beats, self.reports.append)
        self.watch.limit = LIMIT

    def close(self):
        self.watch.stop()
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()
        self.beats.close()


@pytest.fixture
def ranks(tmp_path):
    started = []

    def start(*whats):
        started.append(Ranks(tmp_path, list(whats)))
        return started[-1]

    yield start
    for each in started:
        each.close()


def wait_for(is_so):
    deadline = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_work_is_no_silence(ranks):
    """A C call that releases the GIL, a loop that never does so by itself, and a short one that holds it."""
    holds = "while True: ctypes.PyDLL(None).usleep(int(1e6)); time.sleep(0.01)"
    busy = ranks("time.sleep(600)", "while True: pass", holds)
    time.sleep(2 * LIMIT)
    assert busy.reports == []
    assert [beat.rank for beat in busy.beats.read()] == [0, 1, 2]
    assert busy.beats.read()[2].longest >= 1.0  # it says how long it was kept from its beat


@pytest.mark.skipif(sys.platform != "linux", reason="states of processes are in /proc")
def test_a_stopped_rank_is_named_with_its_cause(ranks):
    two = ranks("time.sleep(600)", "time.sleep(600)")
    time.sleep(2 * LOOK_SECONDS)
    os.kill(two.processes[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    wait_for(lambda: two.reports)
    assert time.monotonic() - began < LIMIT + 4 * max(BEAT_SECONDS, LOOK_SECONDS) + 1
    assert two.reports == [
        "rank 1 has been silent for 3 s (its process is stopped, as by SIGSTOP or a debugger)"
    ]
    time.sleep(2 * LOOK_SECONDS)
    assert len(two.reports) == 1


def test_a_rank_that_hangs_with_the_gil_is_named(ranks):
    one = ranks("ctypes.PyDLL(None).sleep(600)")
    wait_for(lambda: one.reports)
    assert (
        "rank 0 has been silent for 3 s (its process runs, but none of its Python threads do)" in one.reports
    )


def test_a_dead_rank_is_not_silent(ranks):
    one = ranks("pass")
    one.processes[0].wait()
    time.sleep(2 * LIMIT)
    assert one.reports == []


def test_looks_are_counted_and_not_seconds(ranks, monkeypatch):
    """As where the machine was suspended: nobody has looked meanwhile."""
    monkeypatch.setattr("backend.client.silence.LOOK_SECONDS", 3600.0)  # the thread does not look by itself
    one = ranks("time.sleep(600)")
    one.watch._look()
    os.kill(one.processes[0].pid, signal.SIGSTOP)
    time.sleep(2 * BEAT_SECONDS)
    one.watch._look()
    monkeypatch.setattr("backend.client.silence.LOOK_SECONDS", 0.5)
    time.sleep(LIMIT)
    one.watch._look()
    assert one.watch.silent(LIMIT) == ""
    for _ in range(round(LIMIT / 0.5)):
        one.watch._look()
    assert "rank 0" in one.watch.silent(LIMIT)


def test_a_process_that_cannot_be_looked_at_runs(monkeypatch):
    """Where no descriptor is left: hangs are found again once one is."""

    def read_text(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(silence.Path, "read_text", read_text)
    assert silence.process_state(os.getpid()) == "R"


@pytest.mark.parametrize(
    "release, alone",
    [
        ("5.4.0-216-generic", False),
        ("4.18.0-553.el8_10.x86_64", False),
        ("5.6.0", True),
        ("6.8", True),
        ("", False),
    ],
)
def test_ranks_are_killed_by_kernels_that_signal_the_end_of_a_pipe_alone(release, alone):
    assert signals_the_end_alone(release) == alone


@pytest.mark.parametrize(
    "on_gpus, state, compiles, limit, patience",
    [
        (False, "R", False, 10.0, 10.0),
        (True, "R", False, 10.0, 120.0),
        (True, "R", False, 3.0, 36.0),
        (True, "R", False, 60.0, 120.0),
        (True, "R", False, 3600.0, 3600.0),
        (True, "R", True, 10.0, COMPILED_SECONDS),
        (True, "R", True, 3.0, 360.0),
        (False, "R", True, 10.0, 10.0),
        (True, "T", True, 10.0, 10.0),
    ],
)
def test_a_launch_that_waits_for_a_gpu_is_no_hang(monkeypatch, on_gpus, state, compiles, limit, patience):
    """It may hold the GIL for as long as the GPU waits for a peer, which may compile; a stopped process waits
    for nothing."""
    monkeypatch.setattr(silence, "process_state", lambda pid: state)
    watch = silence.SilenceWatch(SimpleNamespace(read=list), print, on_gpus)
    watch.stop()
    for seconds, found in ((patience - 1, ""), (patience, "rank 0 has been silent")):
        watch._seen[0] = (Beat(1, 0, 1, 0.0, compiles), int(seconds / silence.LOOK_SECONDS))
        assert watch.silent(limit).startswith(found) and bool(watch.silent(limit)) == bool(found)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
@pytest.mark.parametrize("stopped", [False, True], ids=["no thread of it runs", "stopped"])
def test_a_rank_that_sees_nothing_ends_with_its_launcher(stopped):
    """ComfyUI was killed, and all ranks wait in launches of kernels, or are stopped. Each of those that share
    the pipe ends, and none that has been told something by it before."""
    code = TOLD.format(root=str(Path(__file__).parents[2]))
    reading, writing = os.pipe()
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], stdin=reading, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        os.close(reading)
        os.write(writing, b"x" * len(ranks))
        assert [rank.stdout.readline() for rank in ranks] == ["begun\n"] * 2
        for rank in ranks if stopped else ():
            os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(0.2)
        assert [rank.poll() for rank in ranks] == [None] * 2
        os.close(writing)
        assert [rank.wait(SOON) for rank in ranks] == [-signal.SIGKILL] * 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.stdout.close()


@pytest.mark.parametrize("text", ["off", "0", "-1", "inf"])
def test_a_limit_that_is_none_is_refused_before_anything_starts(text, monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_SILENT_SECONDS", text)
    with pytest.raises(ConfigError, match=f"SILENT_SECONDS is '{text}', which is no number") as error:
        BackendProcess(ParallelConfig(), "cpu")
    assert str(error.value).count(". ") == 0
    monkeypatch.setenv("PARALLEL_DIT_SILENT_SECONDS", "")
    assert silent_seconds() == 10


def test_started_ranks_have_the_limit_of_the_environment(monkeypatch):
    """While they start, a longer one."""
    monkeypatch.setenv(silence.VARIABLE, "4")
    watch = SilenceWatch(SimpleNamespace(read=list), print)
    watch.stop()
    assert watch.limit == silence.START_SECONDS
    watch.limit_started()
    assert watch.limit == 4.0


@pytest.mark.parametrize("device, on_gpus", [("cuda", True), ("cpu", False)])
def test_the_watch_knows_whether_ranks_are_on_gpus(device, on_gpus, monkeypatch):
    """Launches of kernels wait for GPUs, which on a CPU would be a hang."""
    watches = []

    def watch(*arguments):
        watches.append(SilenceWatch(*arguments))
        return watches[-1]

    monkeypatch.setattr(launcher, "SilenceWatch", watch)
    monkeypatch.setattr(launcher, "launch_command", lambda *_: [sys.executable, "-c", "input()"])
    BackendProcess(ParallelConfig(), device).close()
    assert [each.on_gpus for each in watches] == [on_gpus]
