"""The lists of released files and LoRAs in docs/released_files.md, and the tables of tests/headers for them.

    python scripts/released_files.py            # prints the lists
    python scripts/released_files.py --write    # our tables anew, and the lists in their page
    python scripts/released_files.py --comfy    # ComfyUI's tables anew; with ComfyUI's Python, and gguf in it

A test compares page and tables, and the tables with what the headers give.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from page_parts import Part, markdown

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "scripts", "tests", "tests/support", "tests/unit", "tests/comfy")
HEADERS = ROOT / "tests/headers"
PART = Part("docs/released_files.md", "released files", "scripts/released_files.py")
HEAD = ("file", "family", "ComfyUI's class", "parameters", "tensors left over", "sampling", "latent format")
LORA_HEAD = ("LoRA", "model", "tensors changed", "by ComfyUI", "keys left over")


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
    rows = []
    for file, row in read("released.json").items():
        if isinstance(row, list):
            family, parameters, left = row
            name, kinds, settings, latent = comfy[file]
            sampling = f"{kinds[0].removeprefix('ModelSampling')} {shown(settings)}".strip()
            rows.append((file, family, name, str(parameters), shown_names(left), sampling, latent))
    return rows


def shown(settings: dict) -> str:
    """Return settings in a few words."""
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def shown_names(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 2 else ""
    return ", ".join(names[: 1 if more else 2]) + more


def refused() -> list[tuple[str, ...]]:
    """Return a row for each file that is refused: what the refusal says, without the file's name."""
    return [
        (file, row.removeprefix(file).removeprefix(".safetensors").strip().replace("|", "\\|"))
        for file, row in read("released.json").items()
        if isinstance(row, str)
    ]


def loras() -> list[tuple[str, ...]]:
    """Return a row for each list of keys: what it changes, or its refusal."""
    ours = read("lora_patches.json")
    theirs = read("comfy_loras.json")
    rows = []
    for name, rules in read("loras.json").items():
        row = ours[name]
        taken = isinstance(row, list)
        changed, left = (
            (str(row[0]), str(row[1])) if taken else ("refused", row.partition(".safetensors ")[2])
        )
        rows.append((name, rules["model"], changed, str(theirs[name]), left))
    return rows


def listed() -> str:
    """Return the tables as they stand in the page."""
    files = f"{markdown(HEAD, taken())}\n{markdown(('file', 'refused: it'), refused())}"
    return f"{files}\n{markdown(LORA_HEAD, loras())}"


def main():
    sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
    options = sys.argv[1:]
    sys.argv = sys.argv[:1]  # ComfyUI reads the arguments as its own
    if "--comfy" in options:
        import_module("pack")  # makes parallel_dit importable
        files = import_module("test_released_files")
        write("comfy.json", {file: files.ours(file) for file in files.TAKEN})
        lists = import_module("test_lora_patches")
        write("comfy_loras.json", {name: lists.patches(name) for name in lists.LISTS})
        return
    if "--write" not in options:
        print(listed())
        return
    files = import_module("test_released")
    write("released.json", {file: files.found(file) for file in files.names()})
    lists = import_module("test_lora_lists")
    with TemporaryDirectory() as folder:
        write("lora_patches.json", {name: lists.found(name, Path(folder)) for name in lists.LISTS})
    PART.write(listed())


if __name__ == "__main__":
    main()
