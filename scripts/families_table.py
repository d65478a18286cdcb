"""The tables of model families, from the families' own files and the golden files of the tests: the short one
of README.md and the full one of docs/models.md.

    python scripts/families_table.py [--write]

Prints both; --write puts each into its page. A test compares pages and tables.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support")]
import diffusers
from page_parts import Part, markdown
from tiny import DISTANCES, GOLDEN, facts
from variants import GOLDENS, described

from backend import models
from backend.models.family import Family

SHORT_HEAD = ("model", "files", "notes")
FULL_HEAD = (
    "model",
    "transformer in diffusers",
    "files",
    "CFG, data",
    "Ulysses, ring, PipeFusion",
    "tensor parallel",
    "golden latents that verify it (distance)",
)


def golden_shapes() -> dict[str, dict[str, list[int]]]:
    """Golden family (tests/golden) or golden variant (tests/golden/variants) -> shapes of its checkpoint."""
    plain = {path.stem: facts(path.stem) for path in sorted(GOLDEN.glob("*.json"))}
    variants = {path.stem: described(path.stem) for path in sorted(GOLDENS.glob("*.safetensors"))}
    return {name: each["shapes"] for name, each in (plain | variants).items()}


def golden_files() -> dict[str, list[str]]:
    """Family -> golden families and variants whose checkpoint it is, and how far the farthest of their
    latents is (golden_distances.json)."""
    files: dict[str, list[str]] = {}
    for golden, shapes in golden_shapes().items():
        names = [family.name for family in models.FAMILIES.values() if family.layout.keys(shapes) is not None]
        if not names:
            continue
        largest = max(distance for case, distance in DISTANCES.items() if case.split("__")[0] == golden)
        files.setdefault(names[0], []).append(f"{golden} ({largest:.0e})")
    return files


def title_of(module) -> str:
    """Return the first words of a family's file, which name the model and its variants."""
    return module.__doc__.partition(":")[0].replace("\n", " ")


def files_of(family: Family) -> str:
    """List the kinds of files that a family is read from."""
    kinds = (
        ("single file", family.layout.signature),
        ("folder", models.family_of_class(family.transformer) is family),
    )
    return ", ".join(kind for kind, there in kinds if there)


def name_and_notes(title: str) -> tuple[str, str]:
    """Split a title into the model's name and the rest: variants, whose it is, what it makes."""
    split = re.fullmatch(r"(.+?)(?:(?= \(| in a )|, (?!\d)| of |$)(.*)", title)
    assert split is not None  # its first alternative takes any title
    name, rest = split.groups()
    variants = re.fullmatch(r" \((.*?)\)(.*)", rest)
    if variants is None:
        return name, rest.strip()
    more = variants[2].removeprefix(" of ").strip(" ,")
    separator = " " if more.startswith("and ") else "; "
    return name, separator.join(filter(None, (variants[1], more)))


def full_row(module, family: Family, golden: dict[str, list[str]]) -> tuple[str, ...]:
    """A family's cells in docs/models.md."""
    plan = ""
    if family.tensor_plan:
        plan = "own plan"
    elif getattr(diffusers, family.transformer)._tp_plan:
        plan = "diffusers' plan"
    return (
        title_of(module),
        family.transformer,
        files_of(family),
        "yes",
        family.blocks.whole_only or "yes",
        f"megatron ({plan}), row, column, 2d" if plan else "row, column, 2d",
        ", ".join(golden.get(family.name, ())) or "none",
    )


def short_row(module, family: Family) -> tuple[str, ...]:
    """A family's cells in README.md."""
    name, notes = name_and_notes(title_of(module))
    return (name, files_of(family), notes)


def short_table() -> str:
    """The table of README.md."""
    return markdown(SHORT_HEAD, [short_row(module, module.FAMILY) for module in models.MODULES])


def full_table() -> str:
    """The table of docs/models.md."""
    golden = golden_files()
    return markdown(FULL_HEAD, [full_row(module, module.FAMILY, golden) for module in models.MODULES])


#: Page -> what makes its table.
TABLES = {
    Part(page, "families", "scripts/families_table.py"): make
    for page, make in {"README.md": short_table, "docs/models.md": full_table}.items()
}


if __name__ == "__main__":
    for part, make in TABLES.items():
        table = make()
        if "--write" in sys.argv[1:]:
            part.write(table)
        print(table)
