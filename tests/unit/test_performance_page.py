"""docs/performance.md says of every number what CPU it is of, or that this was not noted."""

import re
from pathlib import Path

from backend.planner.option import COMPILED

PAGE = Path(__file__).resolve().parents[2] / "docs/performance.md"
HEAD = "| command | measured | goal | | CPU, day |\n|---|---|---|---|---|\n"


def test_every_row_of_a_command_names_its_cpu_and_day():
    rows = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()
    cells = [row.strip("|").split(" | ")[-1].strip() for row in rows]
    assert len(cells) >= 17
    for cell in cells:
        assert cell == "the same" or re.fullmatch(
            r"(.*\b(Xeon|EPYC)\b.*|not noted), 2026-\d\d-\d\d.*", cell
        ), cell


def test_the_planner_counts_the_least_that_compiled_blocks_saved():
    """On the one GPU of the page: milliseconds of a step, compiled and not."""
    text = " ".join(
        PAGE.read_text().partition("Compiled blocks took ")[2].partition("one run each")[0].split()
    )
    steps = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+)(?: ms a step)? for ([\d.]+)", text)]
    assert len(steps) == 3
    assert round(min(1 - compiled / eager for compiled, eager in steps), 2) == COMPILED
    design = (PAGE.parent / "design/compile.md").read_text()
    assert f"{COMPILED:.0%}".replace("%", " %") in design
