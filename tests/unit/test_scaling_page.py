"""docs/scaling.md is what scripts/scaling_page.py makes, and describe() is what a dry run counts."""

import math

import pytest
import scaling_page
import torch
from scaling_page import dry_run, model

from backend.config import ConfigError
from backend.errors import UnsupportedError

PAGE = (scaling_page.ROOT / scaling_page.PART.page).read_text()
#: Mechanisms of which describe() counts what is sent once a request, or with each step's embedding.
ONCE = ("modulation",)
#: What the dry run sends, holds and multiplies over what is counted. HiDream's blocks are given some text
#: anew. Tensor parallelism's modulation is gathered ahead of the steps. Layers outside of blocks are not
#: counted.
SENT, KV, MACS = (0.97, 1.03), (0.97, 1.03), (0.97, 1.05)
#: Families that multiply more -> how much, of a rank with one of 16 parts.
MORE = {
    "sana": 2.05,  # convolutions of the lines next to a rank's
}
#: Families that are counted wrongly -> how; the page says so. An entry that is not needed any more fails.
UNLIKE: dict[str, str] = {}
#: Cheap ones of the fast tier.
SMALL = ("flux-dev", "sana")
RUNS = dry_run.stored()


def lines(table: str) -> list[str]:
    return [line for line in table.splitlines() if line]


def test_the_page_is_what_the_script_makes():
    """Every line, which takes minutes."""
    assert scaling_page.PART.read() == scaling_page.tables()


def test_projections_follow_published_times():
    found = scaling_page.errors()
    assert len(found) >= 50 and found[len(found) // 2] <= scaling_page.GOAL
    assert all(line in PAGE for line in lines(scaling_page.published_table()))


@pytest.mark.parametrize("family", SMALL)
def test_lines_of_a_family_are_in_the_page(family):
    for name in scaling_page.MACHINES:
        assert f"| {' | '.join(scaling_page.projected_row(family, name))} |\n" in PAGE
    for method in dry_run.METHODS:
        assert f"| {' | '.join(scaling_page.counted_row(family, method))} |\n" in PAGE
    assert f"| {' | '.join(scaling_page.dry_row(family))} |\n" in PAGE


def test_the_page_calls_its_numbers_projected():
    heads = [line for line in PAGE.splitlines() if line.startswith("## ")]
    assert all("rojected" in head or "Counted" in head or head == "## How to read it" for head in heads)
    assert "No number on this page was measured here" in PAGE


def tables(family: str) -> int:
    """Bytes of tables that are no parameters, and that files store (SD3's positions)."""
    checkpoint = model(family).checkpoint
    names = checkpoint.sources.keys() - set(checkpoint.parameters)
    return sum(math.prod(checkpoint.shapes[name]) for name in names) * torch.bfloat16.itemsize


def check(name: str):
    """Compare a stored run with what is counted of the same rank."""
    family, method, ranks, rank = name.split("/")
    counted = RUNS[name]
    if isinstance(counted, str):
        with pytest.raises((ConfigError, UnsupportedError)):
            model(family).plans(method, int(ranks))
        return
    plan = model(family).plans(method, int(ranks))[int(rank)]
    sent = {each: size for each, size in plan.bytes_per_step.items() if each not in ONCE}
    assert counted["weights"] == plan.weight_bytes + tables(family)
    assert counted["sent"].keys() == sent.keys()
    for mechanism, size in counted["sent"].items():
        assert SENT[0] * sent[mechanism] <= size <= SENT[1] * sent[mechanism], mechanism
    assert KV[0] * plan.kv_bytes <= counted["kv"] <= KV[1] * plan.kv_bytes
    macs = model(family).macs(plan, method, int(ranks))
    assert MACS[0] * macs <= counted["macs"] <= MORE.get(family, MACS[1]) * macs


@pytest.mark.parametrize("family", sorted({name.split("/")[0] for name in RUNS}))
def test_describe_counts_what_the_dry_run_does(family):
    names = [name for name in RUNS if name.startswith(f"{family}/")]
    assert {name.split("/")[1] for name in names} == set(dry_run.METHODS)
    failed = 0
    for name in names:
        try:
            check(name)
        except AssertionError:
            if family not in UNLIKE:
                raise
            failed += 1
    assert bool(failed) == (family in UNLIKE)


def test_every_family_has_a_dry_run():
    """And none is stored that nobody runs again."""
    assert {name.split("/")[0] for name in RUNS} == set(scaling_page.RELEASED)
    every = dry_run.runs(list(scaling_page.RELEASED), list(dry_run.METHODS))
    assert set(RUNS) <= {"/".join(map(str, which)) for which in every}


@pytest.mark.parametrize("which", [("sana", "pipefusion", 16, 15), ("flux-dev", "ulysses", 2, 1)], ids=str)
def test_a_dry_run_is_as_stored(which):
    assert dry_run.counted(*which) == RUNS["/".join(map(str, which))]
