"""Queues the bundled workflow in a real ComfyUI, headless, and brings the image back."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch
from comfy_server import CannotStart, ComfyServer

WORKFLOW = ROOT / "workflows" / "api" / "demo.json"
#: Where a ComfyUI checkout usually has its own Python.
PYTHONS = (".venv/bin/python", "venv/bin/python", "../python_embeded/python.exe")


def python_of(comfyui: Path) -> str:
    """The interpreter that runs this ComfyUI: COMFYUI_PYTHON, the checkout's own environment, or ours."""
    found = (str(comfyui / candidate) for candidate in PYTHONS if (comfyui / candidate).exists())
    return os.environ.get("COMFYUI_PYTHON") or next(found, sys.executable)


def workflow() -> dict:
    """The bundled workflow; on the CPU where there is one GPU, which its two ranks cannot share."""
    graph = json.loads(WORKFLOW.read_text())
    if torch.cuda.device_count() == 1:
        for node in graph.values():
            node["inputs"] |= {"device": "cpu"} if node["class_type"] == "ParallelConfig" else {}
    return graph


def run(comfyui: Path, out: Path):
    """Start ``comfyui`` in a temporary folder with this pack in it, queue the demo, write its image to
    ``out``."""
    os.environ["COMFYUI_PATH"], os.environ["COMFYUI_PYTHON"] = str(comfyui.resolve()), python_of(comfyui)
    folder = Path(tempfile.mkdtemp(prefix="parallel-dit-comfyui-"))
    server = None
    try:
        print(f"Starting {comfyui} with {os.environ['COMFYUI_PYTHON']} ...")
        server = ComfyServer(folder, {"parallel-dit": ROOT})
        result = server.run(workflow(), lambda step: print(f"\r  step {step}", end="", flush=True))
        print()
        if result.status != "success":
            sys.exit(f"ComfyUI says: {result.message.strip()}")
        image = next((folder / "output").rglob("*.png"))
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, out)
        print(
            f"{out}: queued and painted in {result.seconds:.1f} s, {result.previews} previews; the ranks' "
            f"start is in it."
        )
    except CannotStart as reason:
        sys.exit(str(reason))
    finally:
        if server:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
