"""Faults of scripts/fault_table.py after which the ranks go on, on one live backend; docs/reliability.md has
all of them."""

import pytest
from fault_table import FAULTS
from faults import CONFIG, Scene
from live_backend import free_at_the_end  # noqa: F401
from reliability import tried

from backend.client import pool

#: They start another backend, or take long.
ELSEWHERE = ("ComfyUI", "torchrun", "memory", "disk", "while it is read")


@pytest.fixture(scope="module")
def scene(folder):
    return Scene(folder)


@pytest.mark.parametrize(
    "fault",
    [f for f in FAULTS if not f.ends and not any(word in f.name for word in ELSEWHERE)],
    ids=lambda fault: fault.name,
)
def test_the_ranks_go_on(scene, fault):
    pids = pool.backend_for(CONFIG).welcome.pids
    row = tried(fault, scene)
    assert not row.wrong, row
    assert pool.backend_for(CONFIG).welcome.pids == pids
