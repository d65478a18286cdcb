"""The Comfy registry's published rules, as far as they can be held without it: docs.comfy.org/registry, and
what comfy-cli's `comfy node validate` looks at."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMFY = PROJECT["tool"]["comfy"]
#: exec, eval, several statements on a line: what `comfy node validate` selects.
SECURITY_RULES = "S102,S307,E702"
#: comfy-cli's pattern of one part of requires-comfyui.
VERSION = re.compile(r"(?:(==|>=|<=|!=|~=|>|<|<>|=)\s*)?\d+\.\d+\.\d+(?:-[a-zA-Z0-9]+)?")
RAW = "https://raw.githubusercontent.com/"


def shipped() -> list[str]:
    """Tracked files that .comfyignore leaves in; its lines are folders or paths."""
    tracked = subprocess.check_output(["git", "-C", str(ROOT), "ls-files"], text=True).splitlines()
    lines = (ROOT / ".comfyignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]

    def matches(path: str, pattern: str) -> bool:
        return path.startswith(pattern) if pattern.endswith("/") else fnmatch.fnmatch(path, pattern)

    for pattern in patterns:
        assert any(matches(path, pattern) for path in tracked), f"{pattern} leaves out nothing"
        assert (ROOT / pattern).exists(), f".comfyignore names {pattern}, which is not there"
    return [path for path in tracked if not any(matches(path, pattern) for pattern in patterns)]


def test_the_name_and_version_are_accepted():
    name = PROJECT["project"]["name"]
    assert re.fullmatch(r"[A-Za-z](?:[-_.]?[A-Za-z0-9])*", name) and len(name) < 100
    assert "comfy" not in name.lower()
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["project"]["version"])
    assert all(VERSION.fullmatch(part.strip()) for part in COMFY["requires-comfyui"].split(","))
    assert PROJECT["project"]["description"] and COMFY["PublisherId"] and COMFY["DisplayName"]


def test_licence_and_classifiers_are_read():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:300]
    classifiers = PROJECT["project"]["classifiers"]
    environments = [c for c in classifiers if c.startswith("Environment ::")]
    assert environments == ["Environment :: GPU :: NVIDIA CUDA"]
    systems = [c for c in classifiers if c.startswith("Operating System :: ")]
    assert systems == ["Operating System :: POSIX :: Linux"]


def test_addresses_are_of_one_repository():
    urls = PROJECT["project"]["urls"]
    repository = urls["Repository"]
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", repository)
    assert all(url.startswith(repository) for url in urls.values())
    owner = repository.removeprefix("https://github.com/")
    for name in ("Icon", "Banner"):
        path = COMFY[name].removeprefix(f"{RAW}{owner}/main/")
        assert (ROOT / path).is_file(), f"{name} is {COMFY[name]}"


def size(url: str) -> tuple[float, float]:
    drawing = ElementTree.parse(ROOT / url.partition("/main/")[2]).getroot()
    return float(drawing.attrib["width"]), float(drawing.attrib["height"])


def test_images_have_the_sizes_of_the_registry():
    width, height = size(COMFY["Icon"])
    assert width == height <= 400
    width, height = size(COMFY["Banner"])
    assert abs(width / height - 21 / 9) < 0.01


def test_dependencies_are_those_of_requirements_txt():
    """The registry shows the first, ComfyUI-Manager installs the second."""
    lines = (ROOT / "requirements.txt").read_text().split("\n")
    wanted = [line.split("#")[0].strip() for line in lines]
    assert PROJECT["project"]["dependencies"] == list(filter(None, wanted))


def test_the_archive_has_what_nodes_need_and_no_tests():
    paths = shipped()
    tops = {path.split("/")[0] for path in paths}
    needed = {"__init__.py", "backend", "nodes", "web", "workflows", "subgraphs", "demo", "requirements.txt"}
    assert needed | {"pyproject.toml", "LICENSE", "README.md"} <= tops
    assert not tops & {"tests", "benchmarks", ".github", ".ci"}
    assert sum((ROOT / path).stat().st_size for path in paths) < 20 << 20


def test_validate_finds_nothing(tmp_path):
    """Its security check: no eval, no exec, one statement a line."""
    pytest.importorskip("ruff", reason="./scripts/lint installs it")
    paths = [str(ROOT / path) for path in shipped() if path.endswith(".py")]
    rules = ["--isolated", "--select", SECURITY_RULES]
    bad = tmp_path / "bad.py"
    bad.write_text("eval(input()); exec('1')\n")
    ruff = [sys.executable, "-m", "ruff", "check", "-q", "--no-cache", *rules]
    assert subprocess.run([*ruff, *paths], capture_output=True, text=True).stdout == ""
    assert "S307" in subprocess.run([*ruff, str(bad)], capture_output=True, text=True).stdout


@pytest.mark.skipif(shutil.which("comfy") is None, reason="pip install comfy-cli, into another environment")
def test_comfy_node_validate_passes(tmp_path):
    own = {**os.environ, "HOME": str(tmp_path)}
    command = ["comfy", "--skip-prompt", "--no-enable-telemetry", "node", "validate"]
    found = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    said = found.stdout + found.stderr
    assert found.returncode == 0 and "validation checks passed" in said and "Warning" not in said, said


def test_nothing_is_installed_at_run_time():
    """The registry forbids pip in a subprocess; commands for the user to run are texts."""
    calls = re.compile(r"(?:Popen|run|check_output|check_call|call|system)\([^)]*\bpip\b", re.DOTALL)
    sources = [path for path in shipped() if path.startswith(("nodes/", "backend/", "__init__"))]
    assert not [path for path in sources if path.endswith(".py") and calls.search((ROOT / path).read_text())]
