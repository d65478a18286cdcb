"""The programs of docs/headless.md that talk to ComfyUI, as they stand on the page."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comfy_server import PACK
from page_examples import examples

PAGE = examples("headless.md")
DEMO = PACK / "workflows/api/demo.json"
PROMPTS = {"circle": "a red circle left of a blue square on black", "square": "a green square on white"}


@pytest.fixture
def run(comfy, tmp_path):
    """run(ARGUMENTS) -> standard output of a program of the page."""

    def run(*command) -> str:
        env = {**os.environ, "COMFY": f"http://127.0.0.1:{comfy.port}"}
        found = subprocess.run(command, cwd=PACK, env=env, capture_output=True, text=True, timeout=600)
        assert found.returncode == 0, found.stderr
        return found.stdout

    return run


def python(name: str, folder: Path) -> list[str]:
    (folder / name).write_text(PAGE[name])
    return [os.environ.get("COMFYUI_PYTHON", sys.executable), str(folder / name)]


def test_curl_queues_the_demo_and_fetches_its_image(run, comfy, tmp_path):
    reply = json.loads(run("bash", "-euc", PAGE["curl"]))
    assert reply["prompt_id"] and not reply["node_errors"]
    history = {}
    for _ in range(1200):
        if history := comfy.get(f"/history/{reply['prompt_id']}"):
            break
        time.sleep(0.25)
    outputs = history[reply["prompt_id"]]["outputs"].values()
    name = next(image["filename"] for output in outputs for image in output.get("images", []))
    more = f"cd {tmp_path}; ID={reply['prompt_id']} NAME={name}\n{PAGE['curl-more']}"
    assert reply["prompt_id"] in json.loads(run("bash", "-euc", more).splitlines()[0])
    assert (tmp_path / "image.png").read_bytes().startswith(b"\x89PNG")


def test_progress_is_followed_to_the_image(run, comfy, tmp_path):
    graph = json.loads(DEMO.read_text())
    next(n for n in graph.values() if "seed" in n["inputs"])["inputs"]["seed"] = 11  # else it is cached
    (tmp_path / "seed.json").write_text(json.dumps(graph))
    lines = run(*python("queue_graph.py", tmp_path), str(tmp_path / "seed.json")).splitlines()
    assert "ParallelSampler 20/20" in lines and lines[-1].endswith(".png")
    assert list((comfy.folder / "output").rglob(lines[-1]))


def test_a_folder_of_prompts_over_two_workflows(run, comfy, tmp_path):
    (tmp_path / "prompts").mkdir()
    for name, text in PROMPTS.items():
        (tmp_path / "prompts" / f"{name}.txt").write_text(text + "\n")
    graph = json.loads(DEMO.read_text())
    next(n for n in graph.values() if n["class_type"] == "ParallelSampler")["inputs"]["steps"] = 6
    (tmp_path / "quick.json").write_text(json.dumps(graph))
    paths = (str(tmp_path / "prompts"), str(DEMO), str(tmp_path / "quick.json"))
    lines = run(*python("queue_prompts.py", tmp_path), *paths).splitlines()
    assert lines == [f"{number}/4 success" for number in range(1, 5)]
    made = {f"{p.parent.name}/{p.name.split('_')[0]}" for p in (comfy.folder / "output").rglob("*/*.png")}
    assert {"demo/circle", "demo/square", "quick/circle", "quick/square"} <= made
