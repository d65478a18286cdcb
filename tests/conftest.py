"""Fixtures of all tests: rank programs run in the background while the tests of one process do."""

import gc
import os
import shutil
from functools import partial
from operator import itemgetter
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads only get in each other's way

import launch  # noqa: E402 (after the environment is set)

from backend.client import pool  # noqa: E402


def pytest_collection_modifyitems(items):
    """Tests of rank programs are the last: the programs run while the others do."""
    items.sort(key=_has_program)


def pytest_collection_finish():
    """What is imported stays: no garbage collection looks through it again."""
    gc.freeze()


def _has_program(item) -> bool:
    return hasattr(getattr(item, "module", None), "run_program") and "rows" in item.fixturenames


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For checkpoints of a module's tests; not kept, since they are large."""
    folder = tmp_path_factory.mktemp("models")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def allowed_folders(tmp_path_factory):
    """Backends may load what the tests write, and the demo model."""

    pool.allow(tmp_path_factory.getbasetemp(), Path(__file__).parents[1] / "demo")


@pytest.fixture(scope="session", autouse=True)
def rank_programs(request, tmp_path_factory):
    """(name of a module of tests, ranks) -> what its rank program will have found. Those that are asked for
    run from the first test on, one after the other: first those of few ranks, which leave room for other
    processes."""
    wanted = dict.fromkeys(
        (item.module, item.callspec.params["rows"]) for item in request.session.items if _has_program(item)
    )
    folders = {
        module: tmp_path_factory.mktemp("ranks") for module in dict.fromkeys(module for module, _ in wanted)
    }
    if wanted:
        launch.fork_server()  # here: it looks at the environment
    yield launch.in_background(
        {
            (module.__name__, ranks): partial(module.run_program, ranks, folders[module])
            for module, ranks in sorted(wanted, key=itemgetter(1))
        }
    )
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
