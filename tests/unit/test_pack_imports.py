"""What the pack imports where, what it says when a dependency is missing, and the bundled workflows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backend.client.dependencies import REQUIREMENTS, MissingDependencyError, require_dependencies
from backend.config import ConfigError
from backend.errors import UnsupportedError
from backend.protocol import BackendError, ProtocolError, RefusedError

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_COMFY = [
    *(f"backend.client.{path.stem}" for path in sorted((ROOT / "backend/client").glob("*.py"))),
    "parallel_dit.nodes.diffusers_folder.pipelines",
]


@pytest.mark.parametrize("name", WITHOUT_COMFY)
def test_scripts_can_use_it_without_comfyui(name):
    program = f"""
import sys, torch
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests/support")!r}]
import pack
before = set(sys.modules)
import {name}
new = {{module for module in set(sys.modules) - before}}
heavy = ("comfy", "comfy_api", "folder_paths", "diffusers", "yunchang", "transformers")
assert not [m for m in new if m.split(".")[0] in heavy or m.startswith("torch.distributed")], new
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_entry_imports_without_comfyui():
    import pack  # noqa: F401
    import parallel_dit

    assert parallel_dit.WEB_DIRECTORY == "./web" and not hasattr(parallel_dit, "NODE_CLASS_MAPPINGS")


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


@pytest.mark.parametrize("line, why", [("no-such-package>=1.2", "absent"), ("torch>=99", "too old")])
def test_missing_dependency(tmp_path, line, why):
    (tmp_path / "requirements.txt").write_text(f"numpy\n{line}  # {why}\n")
    with pytest.raises(MissingDependencyError, match=f'needs {line}, .*-m pip install "{line}"$'):
        require_dependencies(tmp_path / "requirements.txt")


def test_every_template_is_a_graph_of_the_page():
    """ComfyUI's page offers every workflows/*.json: a graph for /prompt among them would open empty."""
    pages = {path.stem: json.loads(path.read_text()) for path in (ROOT / "workflows").glob("*.json")}
    assert pages and all(page["nodes"] and page["links"] for page in pages.values())
    prompts = {path.stem: json.loads(path.read_text()) for path in (ROOT / "workflows/api").glob("*.json")}
    assert prompts.keys() == pages.keys()
    for name, prompt in prompts.items():
        nodes = {str(node["id"]): node["type"] for node in pages[name]["nodes"]}
        assert {key: node["class_type"] for key, node in prompt.items()}.items() <= nodes.items(), name
