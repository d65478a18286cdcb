"""The bundled workflows, queued in a real ComfyUI."""

import json
import time

import pytest
from comfy_server import PACK

#: Where ComfyUI looks for the file that an input names.
FOLDERS = {"clip_name1": "text_encoders", "clip_name2": "text_encoders", "vae_name": "vae", "model_name": "diffusion_models"}
NEED_FILES = sorted(path.name for path in (PACK / "workflows").glob("*.api.json") if path.name != "demo.api.json")


def read(name: str) -> dict:
    return json.loads((PACK / "workflows" / name).read_text())


@pytest.mark.parametrize("config", [{}, {"ulysses_degree": 1, "cfg_degree": 2}, {"ulysses_degree": 1, "pipefusion_degree": 2}], ids=["as it is", "cfg", "pipefusion"])
def test_demo_makes_a_picture(comfy, config):
    graph = read("demo.api.json")
    next(node for node in graph.values() if node["class_type"] == "ParallelConfig")["inputs"].update(config)
    run = comfy.run(graph)
    assert run.status == "success", run.message or run.node_errors
    assert run.steps[-1] == (20, 20) and run.previews > 0
    image = next(output["images"][0] for output in run.outputs.values() if "images" in output)
    picture = comfy.fetch(f"/view?filename={image['filename']}&type={image['type']}&subfolder={image['subfolder']}")
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(picture[16:20], "big") == 256


@pytest.mark.parametrize("name", NEED_FILES)
def test_workflow_is_accepted_where_its_files_are(comfy, name):
    graph, files = read(name), []
    for node in graph.values():
        for key in FOLDERS.keys() & node["inputs"].keys():
            files.append(comfy.folder / "models" / FOLDERS[key] / node["inputs"][key])
            files[-1].parent.mkdir(exist_ok=True)
            files[-1].touch()
    try:
        status, answer = comfy.post("/prompt", {"prompt": graph})
        assert status == 200 and not answer["node_errors"], answer
        comfy.post("/interrupt", {})  # accepted, which is the point: empty files cannot run
        deadline = time.monotonic() + 60
        while comfy.get("/queue")["queue_running"]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        for file in files:
            file.unlink()
