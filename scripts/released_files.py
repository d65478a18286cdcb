"""The list of released files in docs/models.md, and the tables in tests/headers that it is made of.

    python scripts/released_files.py            # prints the list
    python scripts/released_files.py --write    # tests/headers/released.json anew, and the list in its page
    python scripts/released_files.py --comfy    # tests/headers/comfy.json anew; with ComfyUI's Python

A test compares page and tables, and the tables with what the headers give.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "scripts", "tests", "tests/support", "tests/unit", "tests/comfy")
HEADERS = ROOT / "tests/headers"
PAGE = ROOT / "docs/models.md"
BEGIN = "<!-- released files: made by scripts/released_files.py -->\n"
END = "<!-- end of released files -->\n"
HEAD = ("file", "family", "ComfyUI's class", "parameters", "tensors left over", "latent format")


def read(name: str) -> dict:
    """Return a table of tests/headers."""
    return json.loads((HEADERS / name).read_text())


def write(name: str, rows: dict):
    """Write a table of tests/headers, a line for each file."""
    lines = (f"{json.dumps(file)}: {json.dumps(row)}" for file, row in rows.items())
    (HEADERS / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def taken() -> list[tuple[str, ...]]:
    """Return a row for each file that is taken."""
    comfy = read("comfy.json")
    found = []
    for file, row in read("released.json").items():
        if isinstance(row, list):
            family, parameters, left = row
            found.append((file, family, comfy[file][0], str(parameters), ", ".join(left), comfy[file][3]))
    return found


def refused() -> list[tuple[str, ...]]:
    """Return a row for each file that is refused: what the refusal says, without the file's name."""
    return [
        (file, row.removeprefix(f"{file}.safetensors ").replace("|", "\\|"))
        for file, row in read("released.json").items()
        if isinstance(row, str)
    ]


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def listed() -> str:
    """Return both tables as they stand in the page."""
    return f"{table(HEAD, taken())}\n{table(('file', 'refused: it'), refused())}"


def main():
    sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
    options = sys.argv[1:]
    sys.argv = sys.argv[:1]  # ComfyUI reads the arguments as its own
    if "--comfy" in options:
        import_module("pack")  # makes parallel_dit importable
        tests = import_module("test_released_files")
        write("comfy.json", {file: tests.ours(file) for file in tests.TAKEN})
        return
    if "--write" not in options:
        print(listed())
        return
    tests = import_module("test_released")
    write("released.json", {file: tests.found(file) for file in tests.TABLE})
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + listed() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
