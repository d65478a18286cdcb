"""docs/performance.md says of every number what CPU it is of, or that this was not noted."""

import re
from pathlib import Path

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
