"""Writes locales/en/nodeDefs.json from the nodes' own schemas, and says what locales/zh lacks of it.

    COMFYUI_PYTHON=... python scripts/locale_texts.py --write

A ComfyUI is started for it (COMFYUI_PATH), headless, since schemas need one.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from comfy_server import CannotStart, ComfyServer

LOCALES = ROOT / "locales"
CATEGORY = "Parallel DiT"
#: Inputs that ComfyUI adds and names by itself.
ITS_OWN = ("control_after_generate",)


def node_definitions(object_info: dict) -> dict:
    """Return the texts of this pack's nodes, from /object_info, in the form of ComfyUI's nodeDefs.json."""
    own = {name: info for name, info in object_info.items() if info["category"] == CATEGORY}
    return {name: _texts(info) for name, info in sorted(own.items())}


def _texts(info: dict) -> dict:
    groups = info["input"]
    inputs = {**groups.get("required", {}), **groups.get("optional", {})}
    tooltips = info.get("output_tooltips") or []
    outputs = enumerate(zip(info["output_name"], tooltips, strict=True))
    return {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": {
            name: {"name": name, "tooltip": spec[1]["tooltip"]}
            for name, spec in inputs.items()
            if name not in ITS_OWN
        },
        "outputs": {str(i): {"name": name, "tooltip": tooltip} for i, (name, tooltip) in outputs},
    }


def paths_of(texts: dict, prefix: str = "") -> set[str]:
    """Return the dotted path of every text."""
    paths = set()
    for key, value in texts.items():
        path = f"{prefix}{key}"
        paths |= paths_of(value, f"{path}.") if isinstance(value, dict) else {path}
    return paths


def read(language: str, file: str = "nodeDefs.json") -> dict:
    """Return the texts of a language."""
    return json.loads((LOCALES / language / file).read_text(encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write locales/en")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        try:
            server = ComfyServer(Path(folder), {"parallel-dit": ROOT})
        except CannotStart as reason:
            sys.exit(str(reason))
        try:
            texts = node_definitions(server.get("/object_info"))
        finally:
            server.stop()
    if write:
        target = LOCALES / "en" / "nodeDefs.json"
        target.write_text(json.dumps(texts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    known = paths_of(read("zh"))
    for path in sorted(paths_of(texts) - known):
        print(f"locales/zh lacks {path}")
    for path in sorted(known - paths_of(texts)):
        print(f"locales/zh has {path}, which is no text of a node")


if __name__ == "__main__":
    main()
