"""What the pack imports where, what it says when a dependency is missing, and the bundled workflows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backend.client.launching import dependencies
from backend.client.launching.dependencies import REQUIREMENTS, MissingDependencyError, require_dependencies
from backend.config import ConfigError
from backend.errors import UnsupportedError
from backend.protocol import BackendError, ProtocolError, RefusedError
from backend.runtime.install_command import TOGETHER, install_command

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_COMFY = [
    "backend.probe",  # which auto waits for
    *(f"backend.client.{path.stem}" for path in sorted((ROOT / "backend/client").glob("*.py"))),
    "parallel_dit.nodes.diffusers_folder.pipelines",
]


#: What EACH_ALONE has to find.
NOT_ALONE = {"diffusers", "no_such_module"}
#: Imports each module in a process forked from one that has torch alone, and prints those that fail, and why.
EACH_ALONE = """
import os, sys, torch, pack
HEAVY = {"comfy", "comfy_api", "folder_paths", "diffusers", "yunchang", "transformers"}
for name in sys.argv[1:]:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    before, wrong = set(sys.modules), []
    try:
        __import__(name)
    except BaseException as error:
        wrong = [repr(error)]
    new = set(sys.modules) - before
    wrong += [m for m in new if m.split(".")[0] in HEAVY or m.startswith("torch.distributed")]
    if wrong:
        print(name, *wrong, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def imported_alone() -> str:
    """What EACH_ALONE prints of these modules and of NOT_ALONE."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}"}
    command = [sys.executable, "-c", EACH_ALONE, *WITHOUT_COMFY, *NOT_ALONE]
    return subprocess.run(command, check=True, env=env, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", WITHOUT_COMFY)
def test_scripts_can_use_it_without_comfyui(name, imported_alone):
    assert not [line for line in imported_alone.splitlines() if line.split()[0] == name]


def test_what_is_heavy_or_missing_is_seen(imported_alone):
    assert {line.split()[0] for line in imported_alone.splitlines()} >= NOT_ALONE


def test_entry_imports_without_comfyui():
    import pack  # noqa: F401  # makes parallel_dit importable
    import parallel_dit

    assert parallel_dit.WEB_DIRECTORY == "./web" and not hasattr(parallel_dit, "NODE_CLASS_MAPPINGS")


def test_nodes_and_tests_have_one_backend():
    """Tests that load the pack under its name in ComfyUI do not have each class twice."""
    import pack  # noqa: F401  # makes parallel_dit importable
    from parallel_dit.backend import config, protocol

    from backend.config import ParallelConfig
    from backend.protocol.messages import Sample

    assert config.ParallelConfig is ParallelConfig and protocol.Sample is Sample
    assert config.__name__ == "backend.config"


def test_dependencies_are_all_here():
    require_dependencies()
    assert REQUIREMENTS == ROOT / "requirements.txt"


@pytest.mark.parametrize(
    "error",
    [BackendError, ConfigError, MissingDependencyError, ProtocolError, RefusedError, UnsupportedError],
)
def test_errors_are_shown_without_the_packs_path(error):
    """ComfyUI's page writes module and class in front of a message, and a custom node's module is a path."""
    assert f"{error.__module__}.{error.__qualname__}" == f"parallel_dit.{error.__name__}"


ELSEWHERE = '; sys_platform != "win32"'


@pytest.mark.parametrize("line, why", [("no-such-package>=1.2", "absent"), ("numpy>=99", "too old")])
@pytest.mark.parametrize("marker", ["", ELSEWHERE])
def test_missing_dependency(tmp_path, line, why, marker):
    (tmp_path / "requirements.txt").write_text(f"accelerate{marker}\n{line}{marker}  # {why}\n")
    says = f"needs {line}, .*run: {re.escape(install_command([line]))}$"
    with pytest.raises(MissingDependencyError, match=says):
        require_dependencies(tmp_path / "requirements.txt")


def test_torch_is_installed_with_what_belongs_to_it(tmp_path):
    """pip alone would take another build of it, with which ComfyUI's torchvision cannot be imported."""
    (tmp_path / "requirements.txt").write_text("torch>=99\nno-such-package\n")
    with pytest.raises(MissingDependencyError) as missing:
        require_dependencies(tmp_path / "requirements.txt")
    first, _, then = str(missing.value).partition("; then run: ")
    assert "needs torch>=99, no-such-package" in first and first.endswith(TOGETHER)
    assert then.endswith('install "no-such-package"')


def test_no_pip_command_of_ours_chooses_torch(monkeypatch, tmp_path):
    """Installed without torchvision and torchaudio, another build of it ends ComfyUI's start."""
    assert not [line for line in REQUIREMENTS.read_text().splitlines() if re.match("torch(?!sde)", line)]
    monkeypatch.setattr(dependencies.importlib.metadata, "version", {"torch": "2.5.1+cu124"}.__getitem__)
    (tmp_path / "requirements.txt").write_text("")
    assert dependencies.unmet_requirements(tmp_path / "requirements.txt") == [dependencies.NEEDED_TORCH]


def test_a_package_that_limits_another_comes_before_it():
    """ComfyUI-Manager installs line by line: an older transformers refuses the hub that diffusers brings."""
    names = [re.split("[>;]", line)[0] for line in REQUIREMENTS.read_text().splitlines() if line[:1] != "#"]
    assert names.index("transformers") < names.index("huggingface_hub") < names.index("diffusers")


@pytest.mark.parametrize("has_pip", [False, True])
def test_uv_installs_where_there_is_no_pip(tmp_path, has_pip):
    (tmp_path / "pyvenv.cfg").write_text("uv = 0.9\n")
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (packages / "pip" if has_pip else packages).mkdir(parents=True)
    python = str(tmp_path / "bin" / "python")
    expected = f'"{python}" -m pip install' if has_pip else f'uv pip install --python "{python}"'
    assert install_command(["gguf"], python) == f'{expected} "gguf"'


def test_every_template_is_a_graph_of_the_page():
    """ComfyUI's page offers every workflows/*.json: a graph for /prompt among them would open empty."""
    pages = {path.stem: json.loads(path.read_text()) for path in (ROOT / "workflows").glob("*.json")}
    assert pages and all(page["nodes"] and page["links"] for page in pages.values())
    prompts = {path.stem: json.loads(path.read_text()) for path in (ROOT / "workflows/api").glob("*.json")}
    assert prompts.keys() == pages.keys()
    for name, prompt in prompts.items():
        nodes = {str(node["id"]): (node["type"], node.get("title")) for node in pages[name]["nodes"][1:]}
        kinds = {
            key: (node["class_type"], node.get("_meta", {}).get("title")) for key, node in prompt.items()
        }
        assert kinds == nodes, name


PAGES = sorted((ROOT / "workflows").glob("*.json"))


#: How much higher nodes get when they run, by the beginning of their type: MAX_HEIGHT of web/report.js under
#: a loader, a report and a preview under a sampler, an image under a node that saves one.
GROWTH = {"LoadParallelDiT": 240, "ParallelSampler": 380, "SamplerCustom": 260, "Save": 260}
#: How ComfyUI 0.33 opens a template: nodes with a margin fill a part of the window, and below a zoom its
#: classic canvas draws no texts (8 of 14 pixels, MinFontSizeForLOD and NODE_TEXT_SIZE).
MARGIN, FILLED, READABLE = 10, 0.75, 8 / 14
#: Templates with six or more columns: of a small screen they take too much.
WIDE = {
    *("flux2_edit", "ideogram4_txt2img", "krea2_int8_lora_txt2img", "ltx25_t2v", "ltx2_i2v", "ltx2_t2v"),
    "ltx23_two_pass_t2v",
    *("ltxv_t2v", "parallel_model", "qwen_image_lightning_txt2img", "wan22_lightx2v_t2v"),
    *("qwen_image_edit_2511_lightning", "wan22_t2v_two_stage"),
}


def box(node: dict, is_grown: bool = False) -> tuple[float, float, float, float]:
    """Left, top (with its title), right and bottom of a node, before or after it has run."""
    (x, y), (width, height) = node["pos"], node["size"]
    grown = sum(more for name, more in GROWTH.items() if node["type"].startswith(name))
    return x, y - 30, x + width, y + height + grown * is_grown


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_a_template_is_laid_out(path):
    """No two nodes overlap, every node is in one group, both also after a run; and the note says for how many
    GPUs it is."""
    page = json.loads(path.read_text())
    note, *nodes = page["nodes"]
    assert (
        re.match(r"\*\*(\d+|All) GPUs\.\*\*", note["widgets_values"][0])
        and "`" not in note["widgets_values"][0]
    )
    boxes = [box(node, is_grown=True) for node in page["nodes"]]
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert not [
            other
            for other in boxes[:i]
            if left < other[2] and other[0] < right and top < other[3] and other[1] < bottom
        ]
    for left, top, right, bottom in boxes[1:]:
        inside = [
            group
            for group in page["groups"]
            if group["bounding"][0] <= left
            and right <= group["bounding"][0] + group["bounding"][2]
            and group["bounding"][1] <= top
            and bottom <= group["bounding"][1] + group["bounding"][3]
        ]
        assert len(inside) == 1


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_the_page_can_offer_every_file(path):
    """Each file that a loader names is offered, but folders of diffusers."""
    for node in json.loads(path.read_text())["nodes"]:
        files = {value for value in node["widgets_values"] if str(value).endswith(".safetensors")}
        offered = node["properties"].get("models", [])
        assert {entry["name"] for entry in offered} == files
        for entry in offered:
            assert entry["url"].startswith("https://huggingface.co/") and entry["url"].endswith(entry["name"])
            assert entry["directory"] in (
                "diffusion_models",
                "loras",
                "text_encoders",
                "vae",
                "checkpoints",
                "clip_vision",
                "latent_upscale_models",
            )


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_a_file_has_one_place(path):
    """An all-in-one file is in models/checkpoints, for Load Parallel DiT too."""
    note, *nodes = json.loads(path.read_text())["nodes"]
    places = {}
    for entry in (entry for node in nodes for entry in node["properties"].get("models", [])):
        assert places.setdefault(entry["name"], entry["directory"]) == entry["directory"]
    for name in re.findall(r"models/diffusion_models/([\w.-]+)", note["widgets_values"][0]):
        assert places.get(name, "diffusion_models") == "diffusion_models"


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_a_template_opens_with_texts(path):
    """From its card, in a browser on a screen of 1920 x 1080, and on 1366 x 768 unless it is WIDE."""
    boxes = [box(node) for node in json.loads(path.read_text())["nodes"]]
    size = [max(each[axis + 2] for each in boxes) - min(each[axis] for each in boxes) for axis in (0, 1)]

    def zoom(*window: int) -> float:
        return min(FILLED * inner / (outer + 2 * MARGIN) for inner, outer in zip(window, size, strict=True))

    assert zoom(1920, 945) >= READABLE
    assert (zoom(1366, 768) >= READABLE) == (path.stem not in WIDE)
