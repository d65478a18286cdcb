"""Ranks of rank programs have few threads that wake by themselves."""

import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import launch
import pytest
import torch
import torch.distributed as dist

GROUPS = 8
#: Threads of a group's own, which sleep until there is work.
WORKERS = dist.ProcessGroupGloo._Options()._threads
#: Longest time of a forked rank.
SECONDS = 300


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_groups_of_a_rank_share_the_thread_that_polls(tmp_path):
    """Each group's own device would poll 100 times a second. The timeout is the one that was asked for."""
    out = tmp_path / "found"
    # no fork: the process of all unit tests may be larger than what is left of memory
    rank = multiprocessing.get_context("spawn").Process(target=as_rank, args=(tmp_path, out), daemon=True)
    rank.start()
    rank.join(SECONDS)
    rank.kill()  # where it hangs
    log = (tmp_path / "rank0.log").read_text()
    assert rank.exitcode == 0, log
    assert out.read_text() == f"{GROUPS * WORKERS} {{77.0}}"


def as_rank(folder: Path, out: Path):
    """Run count_threads() as rank programs are run."""
    sys.modules["a_program"] = cast(Any, SimpleNamespace(main=count_threads))
    launch._rank(0, "a_program", 1, folder, 0, (out,))


def count_threads(out: Path):
    before = len(os.listdir("/proc/self/task"))
    groups = [dist.new_group([0], timeout=timedelta(seconds=77)) for _ in range(GROUPS)]
    threads = len(os.listdir("/proc/self/task")) - before
    timeouts = {seconds_of(group) for group in groups}
    out.write_text(f"{threads} {timeouts}")


def seconds_of(group) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
