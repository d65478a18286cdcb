"""Parts of pages that scripts make: tables in Markdown, between two marks."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Write a table, one line a row."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


@dataclass(frozen=True)
class Part:
    """The part ``name`` of a page, which ``script`` makes; both are paths below the project's folder."""

    page: str
    name: str
    script: str

    def _cut(self) -> tuple[str, str, str]:
        begin = f"<!-- {self.name}: made by {self.script} -->\n"
        end = f"<!-- end of {self.name} -->\n"
        before, _, rest = (ROOT / self.page).read_text().partition(begin)
        made, _, after = rest.partition(end)
        return before + begin, made, end + after

    def read(self) -> str:
        """Return what the page holds."""
        return self._cut()[1]

    def rows(self) -> dict[str, tuple[str, ...]]:
        """Return the lines of the table that the page holds: its first cell -> its cells."""
        cells = [
            tuple(cell.strip() for cell in line.strip("|").split(" | "))
            for line in self.read().splitlines()[2:]
        ]
        return {each[0]: each for each in cells}

    def write(self, made: str):
        """Put ``made`` into the page."""
        before, _, after = self._cut()
        (ROOT / self.page).write_text(before + made + after)
