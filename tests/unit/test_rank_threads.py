"""Ranks of rank programs have few threads that wake by themselves."""

import multiprocessing
import os
import sys
from datetime import timedelta
from types import SimpleNamespace

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
def test_groups_of_a_rank_share_the_thread_that_polls(tmp_path, monkeypatch):
    """Each group's own device would poll 100 times a second. The timeout is the one that was asked for."""

    def main(out: str):
        before = len(os.listdir("/proc/self/task"))
        groups = [dist.new_group([0], timeout=timedelta(seconds=77)) for _ in range(GROUPS)]
        threads = len(os.listdir("/proc/self/task")) - before
        timeouts = {seconds_of(group) for group in groups}
        (tmp_path / out).write_text(f"{threads} {timeouts}")

    monkeypatch.setitem(sys.modules, "a_program", SimpleNamespace(main=main))
    arguments = (0, "a_program", 1, tmp_path, 0, ("found",))
    rank = multiprocessing.get_context("fork").Process(target=launch._rank, args=arguments, daemon=True)
    rank.start()
    rank.join(SECONDS)
    rank.kill()  # where it hangs
    log = (tmp_path / "rank0.log").read_text()
    assert rank.exitcode == 0, log
    assert (tmp_path / "found").read_text() == f"{GROUPS * WORKERS} {{77.0}}"


def seconds_of(group) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
