"""The table of docs/design/host.md: what a steady micro-step of every family and method starts and waits for.

    python scripts/launches_page.py [--write]

Prints it; --write puts it into the page. Counts are those that benchmarks/launches.py --write has stored.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "benchmarks")]
import launches
from page_parts import Part, markdown

PART = Part("docs/design/host.md", "launches", "scripts/launches_page.py")


def cell(family: str, method: str) -> str:
    """Write the counts of a family under a method; nothing where they are not stored."""
    if method not in launches.methods_of(family):
        return ""
    device, host, waits = launches.stored()[family][method]
    return f"{device:g}, {host:g}, {waits:g}"


def table() -> str:
    """Write a line for each family and each quantized model."""
    every = (*launches.FAMILIES, *launches.PACKED)
    methods = (*launches.METHODS, *launches.FURTHER)
    rows = [(family, *(cell(family, method) for method in methods)) for family in every]
    return markdown(("family (golden size)", *methods), rows)


def main():
    if "--write" in sys.argv[1:]:
        PART.write(table())
    else:
        print(table())


if __name__ == "__main__":
    main()
