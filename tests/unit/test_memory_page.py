"""docs/memory.md is what scripts/memory_table.py makes."""

import card_plans
import memory_table
import pytest
from released_forms import checkpoint_of

from backend.config import ParallelConfig
from backend.planner.choose import choose
from backend.planner.weight_swaps import WeightSwaps

PAGE = memory_table.PART.read()
WAN = "Wan 2.2 A14B, one expert, fp8 scaled"


def test_the_page_is_what_the_script_makes():
    """Every line, which takes a minute."""
    assert memory_table.PART.read() == memory_table.tables()


@pytest.mark.parametrize("model", ["Flux.1 dev, fp8", "Qwen-Image, Q4_K", WAN])
def test_the_lines_of_a_file_are_in_the_page(model):
    file = next(file for file in memory_table.FILES if file.model == model)
    for lines in memory_table.rows(file):
        for line in lines:
            assert f"| {' | '.join(line)} |\n" in PAGE


@pytest.mark.parametrize(
    "file", [file for file in memory_table.FILES if file.form], ids=lambda file: file.model
)
def test_a_form_is_a_file_of_its_model(file):
    """Derived files have the parameters of the one that they are derived from, in fewer bytes."""
    checkpoint = checkpoint_of(file)
    original = checkpoint_of(memory_table.File(file.model, "", file.header))
    assert checkpoint.family.name == original.family.name
    assert checkpoint.config == original.config
    assert len(checkpoint.sources) == len(original.sources)


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
