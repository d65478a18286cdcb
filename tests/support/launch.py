"""Runs a rank program on ranks that are forked from one process with everything imported: imports would cost
each of them seconds."""

import gc
import importlib
import itertools
import json
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from backend.parallel import mesh

TESTS = Path(__file__).parents[1]
PROGRAMS = [
    "uncollected",  # before what is imported
    *("ranks.dispatch", "ranks.matrix", "ranks.family_runs", "ranks.packed", "ranks.native_int8"),
    "ranks.compilers",
    "ranks.fixed_segments",
]
#: Ranks give way to the tests of one process and of tests/socket, which run at the same time and must not be
#: what is left in the end, and to those of programs that were started before: the first ones take longest.
NICE = itertools.chain(range(10, 19, 3), itertools.repeat(19))
#: Exit status of ranks whose tests have ended; 1 is torch's own, where an error could not be written down.
PARENT_ENDED = 3
#: Set, every run of two ranks that samples is compiled: an hour of two cores, and more where others use them.
EVERY_COMPILED = "PARALLEL_DIT_TEST_EVERY_COMPILED"
#: Longest time of a rank program: most of it may be spent giving way to others.
SECONDS = 14_400 if EVERY_COMPILED in os.environ else 3000
#: Memory of ranks in large pages: weights are read and copied hundreds of times (8 % of their seconds).
LARGE_PAGES = "glibc.malloc.hugetlb=1"
#: Rank programs that run at the same time: ranks wait for each other, and for rank 0's references.
AT_ONCE = 3


def in_background(jobs: dict[Hashable, Callable[[], object]]) -> dict[Hashable, Future]:
    """Run ``jobs`` in their order, AT_ONCE of them, in threads that do not outlive the tests; what comes of
    each, or its error."""
    futures = {key: Future() for key in jobs}
    waiting = queue.SimpleQueue()
    for item in jobs.items():
        waiting.put(item)

    def work():
        while True:
            try:
                key, job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                futures[key].set_result(job())
            except Exception as error:  # of the tests that ask for it
                futures[key].set_exception(error)

    for _ in range(AT_ONCE):
        threading.Thread(target=work, daemon=True).start()
    return futures


def run_ranks(program: str, ranks: int, folder: Path, *arguments: object) -> Any:
    """The JSON that rank 0 of the module ``program`` wrote into the last argument of its main(); fails with
    the first rank's traceback and the ranks' output."""
    fork_server()
    folder = folder / f"{program} {ranks}"
    folder.mkdir()
    out = folder / "found.json"
    context = start_processes(
        _rank,
        (program, ranks, folder, next(NICE), (*arguments, str(out))),
        ranks,
        join=False,
        daemon=True,
        start_method="forkserver",
    )
    assert context is not None  # join=False
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{program} on {ranks} ranks did not end in {SECONDS} s.\n{_output(folder)}"
                )
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise AssertionError(f"{program} on {ranks} ranks: {error}\n{_output(folder)}") from None
    finally:
        for process in context.processes:
            process.kill()
    return json.loads(out.read_text())


@cache
def fork_server():
    """Start the process that ranks are forked from. It has no threads yet, and none of this one's state but
    the environment: kernels and threads are those that the tests are run with."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PROGRAMS)
    folders = [TESTS.parent, TESTS, TESTS / "support"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    here = dict(PYTHONPATH=path, GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="", GLIBC_TUNABLES=LARGE_PAGES)
    with mock.patch.dict(os.environ, here):
        forkserver.ensure_running()


def _rank(rank: int, program: str, world: int, folder: Path, nice: int, arguments: tuple):
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(nice)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    share_gloo_device()
    store = mesh.file_store(str(folder / "store"))  # where the ranks meet
    dist.init_process_group("gloo", timeout=mesh.TIMEOUT, store=store, rank=rank, world_size=world)
    assert program in sys.modules, f"the fork server could not import {program}"
    gc.freeze()  # what is imported stays: no collection looks through it again
    gc.enable()
    importlib.import_module(program).main(*arguments)


def share_gloo_device():
    """Have all process groups of this process send through one device of gloo. A device of each would have a
    thread that wakes every 10 ms, and a program makes dozens of groups that mostly wait."""
    device = ProcessGroupGloo.create_device(interface="lo")
    of_torch = ProcessGroupGloo.__init__

    def init(self, store, rank: int, size: int, timeout, enable_reconfigure: bool = False):
        assert not enable_reconfigure, "of torch 2.14 and later, which set it where it is asked for"
        options = ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = timeout
        of_torch(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init


def _end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(PARENT_ENDED)


def _output(folder: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(folder.glob("rank*.log")))
