"""What is measured for the planner: by which process, and for which GPUs."""

import interpreters
import pytest

from backend.client import measurements
from backend.client.dependencies import require_dependencies


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """The working directory has a package that is called backend."""
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend/__init__.py").write_text("raise ImportError('this is another backend')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_package_named_backend_where_comfyui_runs_does_not_measure(foreign, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(foreign / "cache"))
    rates = measurements.machine_rates("cpu", [0], lambda: None, lambda line: None)
    assert rates.ranks == 1 and rates.gemm > 0


def test_nor_is_it_asked_for_the_packages_of_the_ranks(foreign):
    (foreign / "requirements.txt").write_text("torch\n")
    python = interpreters.recording(foreign / "python", foreign / "log")
    require_dependencies(foreign / "requirements.txt", str(python))
