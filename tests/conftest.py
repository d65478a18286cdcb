"""Fixtures of all tests: rank programs run in the background while the tests of one process do."""

import gc
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # everything here is of CPUs; scripts/doctor.py --full is of GPUs
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads only get in each other's way
# bits do not depend on where tensors lie in memory, as MKL's do on AMD's processors otherwise
os.environ.setdefault("MKL_CBWR", "AUTO")

gc.disable()  # until all is imported, which leaves no garbage

import launch
import tiers
import tiny

from backend.client import pool

#: gc.set_threshold(): new objects after which the youngest are looked through, and how many such collections
#: reach the next age. A built or traced model is a hundred thousand objects that stay: Python's thresholds
#: look through all of them about three times as often.
COLLECT_AFTER = (20_000, 2, 2)


def pytest_addoption(parser):
    group = parser.getgroup("tiers")
    group.addoption("--all", action="store_true", help="run every test, also those marked full")
    group.addoption("--left-out", action="store_true", help="list what runs under --all alone")


def pytest_configure(config):
    config.option.collectonly |= config.option.left_out


def pytest_collection_modifyitems(config, items):
    """Leave out what runs under --all alone, unless it is asked for by name. Tests of rank programs are the
    last: the programs run while the others do."""
    tiers.choose(items)
    left_out = [item for item in items if tiers.is_full(item) and not tiers.is_named(item)]
    if config.option.left_out:
        left_out = [item for item in items if not tiers.is_full(item)]
    elif config.option.all:
        left_out = []
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    items.sort(key=_has_program)


def pytest_collection_finish():
    """What is imported stays: no garbage collection looks through it again."""
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen_after_a_module():
    """Nor through what a module's tests imported: an engine collects garbage with every model it unloads."""
    yield
    gc.collect()
    gc.freeze()


def _has_program(item) -> bool:
    return bool(_runs(item))


def _runs(item) -> list:
    """What a test needs of its module's rank program."""
    if not hasattr(getattr(item, "module", None), "run_program") or not hasattr(item, "callspec"):
        return []
    params = item.callspec.params
    return params["runs"] if "runs" in params else [params["run"]] if "run" in params else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For checkpoints of a module's tests; removed afterwards, since they are large."""
    folder = tmp_path_factory.mktemp("models")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def own_signals():
    """doctor.main handles signals of its process, which here is pytest's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def allowed_folders(tmp_path_factory):
    """Backends may load what the tests write, and the demo model."""

    pool.allow(tmp_path_factory.getbasetemp(), Path(__file__).parents[1] / "demo")


@pytest.fixture(scope="session", autouse=True)
def shared_checkpoints(tmp_path_factory):
    """Where tiny.shared() keeps its files, for this process and those that it starts: scripts/test has made a
    folder for both of its processes."""
    if tiny.SHARED in os.environ:
        yield
        return
    folder = tmp_path_factory.mktemp("shared")
    os.environ[tiny.SHARED] = str(folder)
    yield
    del os.environ[tiny.SHARED]
    shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def rank_programs(request, tmp_path_factory, shared_checkpoints):
    """(name of a module of tests, ranks) -> what its rank program will have found of the runs that the
    selected tests need. Programs run from the first test on: first those of few ranks, which leave room for
    other processes, and of those the ones with most runs, which nobody shall wait for in the end."""
    wanted = {}
    for item in filter(_has_program, request.session.items):
        for run in _runs(item):
            wanted.setdefault((item.module, run.ranks), {})[run] = None
    folders = {
        module: tmp_path_factory.mktemp("ranks") for module in dict.fromkeys(module for module, _ in wanted)
    }
    if wanted:
        launch.fork_server()  # here: it looks at the environment
    yield launch.in_background(
        {
            (module.__name__, ranks): partial(module.run_program, ranks, folders[module], list(runs))
            for (module, ranks), runs in sorted(wanted.items(), key=_turn)
        }
    )
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)


def _turn(wanted) -> tuple[int, int]:
    (_, ranks), runs = wanted
    return ranks, -len(runs)
