"""The README's table of model families, from the families' own files and the golden files of the tests.

    python scripts/families_table.py [--write]

Prints it; --write puts it into README.md. A test holds the two together.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import diffusers

from backend import models
from backend.models.family import Family

README, BEGIN, END = (
    ROOT / "README.md",
    "<!-- families: made by scripts/families_table.py -->\n",
    "<!-- end of families -->\n",
)
HEAD = (
    "model",
    "transformer in diffusers",
    "files",
    "CFG, data",
    "Ulysses, ring, PipeFusion",
    "tensor parallel",
    "golden latents that hold it (distance)",
)


def golden_files() -> dict[str, list[str]]:
    """Family -> names of the golden files (tests/golden) whose checkpoint it is, and how far the farthest of
    their latents is (golden_distances.json)."""
    found: dict[str, list[str]] = {}
    distances = json.loads((ROOT / "tests/golden_distances.json").read_text())
    for path in sorted((ROOT / "tests/golden").glob("*.json")):
        shapes = json.loads(path.read_text())["shapes"]
        name = next(
            (family.name for family in models.FAMILIES.values() if family.layout.keys(shapes) is not None),
            None,
        )
        largest = max(distance for case, distance in distances.items() if case.split("__")[0] == path.stem)
        found.setdefault(name, []).append(f"{path.stem} ({largest:.0e})")
    return found


def row(module, family: Family, golden: dict[str, list[str]]) -> tuple[str, ...]:
    """A family's cells; its title is the first words of its file."""
    plan = (
        "own plan"
        if family.tensor_plan
        else "diffusers' plan"
        if getattr(diffusers, family.transformer)._tp_plan
        else ""
    )
    kinds = (
        ("single file", family.layout.signature),
        ("folder", models.family_of_class(family.transformer) is family),
    )
    return (
        module.__doc__.partition(":")[0],
        family.transformer,
        ", ".join(kind for kind, there in kinds if there),
        "yes",
        family.blocks.whole_only or "yes",
        f"megatron ({plan}), row, column, 2d" if plan else "row, column, 2d",
        ", ".join(golden.get(family.name, ())) or "none",
    )


def table() -> str:
    """Markdown."""
    golden = golden_files()
    rows = [HEAD, ("---",) * len(HEAD), *(row(module, module.FAMILY, golden) for module in models.MODULES)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def put_into(text: str) -> str:
    """The README's text with this table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(put_into(README.read_text()))
    print(table(), end="")
