"""docs/reliability.md has what scripts/reliability.py found: lines of its faults, each as it should be."""

import pytest
import reliability
from fault_table import FAULTS

LINES = reliability.PART.rows()
BY_NAME = {fault.name: fault for fault in FAULTS}


def test_the_page_has_every_fault_in_its_order():
    assert list(LINES) == list(BY_NAME) and len(BY_NAME) == len(FAULTS)


@pytest.mark.parametrize("name", LINES)
def test_a_line_says_what_the_fault_should(name):
    _, seconds, message, next_run, left = LINES[name]
    fault = BY_NAME[name]
    assert fault.says in message and "exact" in next_run
    assert left in ("nothing", "log, for a day")
    assert not fault.ends or next_run.startswith("fresh")
    # a rank is found silent within 15 s; everything else that stands still for 20 s is only late
    assert float(seconds.removesuffix(" s")) <= (15 if "(SIGSTOP)" in name else 60)
