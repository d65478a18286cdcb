"""Programs of a page of the documentation, as a reader would copy them."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(page: str) -> dict[str, str]:
    """Name of every example of docs/PAGE -> its text."""
    return dict(EXAMPLE.findall((DOCS / page).read_text()))
