"""docs/memory.md is what scripts/memory_table.py makes."""

import json
from functools import cache

import card_plans
import memory_table
import pytest
from released_forms import checkpoint_of

from backend.config import ParallelConfig
from backend.planner.choose import choose
from backend.planner.weight_swaps import WeightSwaps

PAGE = memory_table.PART.read()
#: Of the fast tier: a derived file is among them.
FAST = ("Flux.1 dev, fp8", "Qwen-Image, Q4_K", "Wan 2.2 A14B, one expert, fp8 scaled")
#: A file's lines in both tables: its own test makes them, and that of the whole page has them from there.
lines_of = cache(memory_table.rows)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.model, marks=() if file.model in FAST else pytest.mark.full)
        for file in memory_table.FILES
    ],
)
def test_a_file(file):
    """Its lines are in the page. A derived file has the parameters of the one that it is derived from, in
    fewer bytes."""
    for lines in lines_of(file):
        for line in lines:
            assert f"| {' | '.join(line)} |\n" in PAGE
    if not file.form:
        return
    checkpoint = checkpoint_of(file)
    original = checkpoint_of(memory_table.File(file.model, "", file.header))
    assert checkpoint.family.name == original.family.name
    assert checkpoint.config == original.config
    assert len(checkpoint.sources) == len(original.sources)


def test_the_page_is_what_the_script_makes(monkeypatch):
    """Every line, in their order, and nothing else."""
    monkeypatch.setattr(memory_table, "rows", lines_of)
    assert memory_table.PART.read() == memory_table.tables()


def test_experts_take_turns_on_cards_that_hold_one():
    """As auto plans it: on two cards of 16 GB, which hold one expert, and not both."""
    _, both = (line for line in PAGE.splitlines() if line.startswith("| Wan 2.2 A14B, both experts, fp8"))
    sixteen = both.split(" | ")[2]
    assert sixteen.startswith("4: ") and sixteen.endswith("(2, in turns)")
    row = next(row for row in card_plans.TABLES[16] if row.both)
    choice = choose(card_plans.question(row, 16))
    assert choice.plan.world_size == 2 and choice.option.swap_seconds and not choice.one.fits
    assert WeightSwaps().must_reread(ParallelConfig(ulysses_degree=2, shard_weights=True), 1)
    page = (memory_table.ROOT / memory_table.PART.page).read_text().split()
    assert "read again from its file under `shard_weights`" in " ".join(page)


@pytest.mark.parametrize("card", [16, pytest.param(24, marks=pytest.mark.full)])
def test_plans_of_two_cards_are_in_the_page(card):
    """docs/degrees.md is what scripts/card_plans.py makes."""
    assert card_plans.table(card) in card_plans.PART.read()


@pytest.mark.full
def test_quick_start_says_what_auto_takes():
    """README's table is what scripts/card_plans.py makes, and its templates have these steps and guidance."""
    assert card_plans.QUICK_PART.read() == card_plans.quick()
    for row in card_plans.TABLES[16]:
        graph = json.loads(
            (memory_table.ROOT / f"workflows/api/{card_plans.TEMPLATES[row.file]}.json").read_text()
        )
        samplers = [node["inputs"] for node in graph.values() if "steps" in node["inputs"]]
        assert {(inputs["steps"], inputs["cfg"]) for inputs in samplers} == {(row.steps, row.cfg)}


@pytest.mark.full
def test_gains_of_models_that_do_not_fit_are_in_the_page():
    assert card_plans.GATHERED_PART.read() == card_plans.gathered()
