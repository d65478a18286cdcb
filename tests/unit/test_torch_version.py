"""Which version of torch is installed; test_lean_imports.py imports the backend under an older one."""

import importlib.machinery
import importlib.util
from importlib import metadata

import pytest
import torch

from backend.client.launching import dependencies
from backend.runtime import torch_version
from backend.runtime.install_command import TOGETHER, how_to_install


@pytest.mark.parametrize(
    "installed, least, is_later",
    [
        ("2.13.0+cpu", (2, 12), True),
        ("2.6.0", (2, 12), False),
        ("2.12.0a0+git1", (2, 12), True),
        ("3.0", (2, 12), True),
    ],
)
def test_versions(monkeypatch, installed, least, is_later):
    monkeypatch.setattr(torch_version, "torch_version", lambda: installed)
    assert torch_version.has_torch(*least) == is_later


@pytest.fixture
def no_distribution(monkeypatch):
    """As builds of torch from source, or of conda, may be."""

    def version(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    torch_version.torch_version.cache_clear()
    yield
    torch_version.torch_version.cache_clear()


def test_a_torch_without_a_distribution_has_a_version(no_distribution):
    assert torch_version.torch_version() == torch.__version__
    assert torch_version.has_torch(2, 6) and not torch_version.has_torch(99, 0)


def test_what_such_a_torch_lacks_is_said_before_ranks_start(no_distribution, tmp_path):
    listed = tmp_path / "requirements.txt"
    listed.write_text("diffusers>=0.1\n")
    unmet = dependencies.unmet_requirements(listed)
    assert unmet == ["torch>=2.6 with its dist-info, by which diffusers finds it", "diffusers>=0.1"]
    assert how_to_install(unmet[:1]) == TOGETHER


@pytest.mark.parametrize("has_folder", [True, False])
def test_no_version_is_made_up(no_distribution, monkeypatch, tmp_path, has_folder):
    folder = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", {"torch": folder if has_folder else None}.get)
    with pytest.raises(metadata.PackageNotFoundError):
        torch_version.torch_version()
