"""Faults of scripts/fault_table.py after which the ranks go on, on one live backend; docs/reliability.md has
all of them."""

import pytest
from fault_table import FAULTS
from faults import CONFIG, Scene
from live_backend import free_at_the_end  # noqa: F401  # fixtures
from reliability import tried

from backend.client import pool

#: They start another backend, or take long: scripts/reliability.py alone makes them.
ELSEWHERE = (
    "everything stopped for 20 s, ComfyUI too",
    "torchrun stopped, sampling",
    "ComfyUI killed, sampling",
    "ComfyUI killed when rank 1 is stopped",
    "no memory left in a load",
    "no shared memory",
    "disk of the logs full at the start",
    "file overwritten while it is read",
)
SPARE_THE_RANKS = [fault for fault in FAULTS if not fault.ends]


@pytest.fixture(scope="module")
def scene(folder):
    return Scene(folder)


def test_what_is_left_out_are_faults():
    assert set(ELSEWHERE) < {fault.name for fault in SPARE_THE_RANKS}


@pytest.mark.parametrize(
    "fault",
    [fault for fault in SPARE_THE_RANKS if fault.name not in ELSEWHERE],
    ids=lambda fault: fault.name,
)
def test_the_ranks_go_on(scene, fault):
    pids = pool.backend_for(CONFIG).welcome.pids
    row = tried(fault, scene)
    assert not row.wrong, row
    assert pool.backend_for(CONFIG).welcome.pids == pids
