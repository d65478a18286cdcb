"""docs/memory.md is what scripts/memory_table.py makes."""

import memory_table
import pytest
from released_forms import checkpoint_of

PAGE = memory_table.PART.read()


def test_the_page_is_what_the_script_makes():
    """Every line, which takes a minute."""
    assert memory_table.PART.read() == memory_table.tables()


@pytest.mark.parametrize("model", ["Flux.1 dev, fp8", "Qwen-Image, Q4_K"])
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
