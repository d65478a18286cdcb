"""PARALLEL_DIT_PYTHON: ranks on the packages of another environment."""

import os
import sys

import interpreters
import pytest

from backend.client.auto import measurements
from backend.client.auto.model_choice import ModelChoice
from backend.client.launching import interpreter, nccl_settings
from backend.client.launching.agent_command import agent_command
from backend.client.launching.dependencies import MissingDependencyError, require_dependencies
from backend.client.launching.rank_environment import sanitized_environment
from backend.config import ConfigError, ParallelConfig
from backend.protocol import BackendError


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    python = interpreters.recording(tmp_path / "python", tmp_path / "log")
    monkeypatch.setenv(interpreter.VARIABLE, str(python))
    return str(python)


def test_without_the_variable_it_is_this_one(monkeypatch):
    monkeypatch.delenv(interpreter.VARIABLE, raising=False)
    assert interpreter.ranks_python() == sys.executable
    assert interpreter.inherited({"PYTHONPATH": "/p"}) == {"PYTHONPATH": "/p"}


def test_what_was_measured_with_its_packages_is_measured_anew_with_others(tmp_path, monkeypatch):
    """Their versions are not known here; an installation changes the folder."""
    monkeypatch.delenv(interpreter.VARIABLE, raising=False)
    assert interpreter.packages_changed() == 0
    packages = tmp_path / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    python = interpreters.recording(tmp_path / "bin/python", tmp_path / "log")
    monkeypatch.setenv(interpreter.VARIABLE, str(python))
    keys = []
    for seconds in (1, 2):
        os.utime(packages, (seconds, seconds))
        keys.append([measurements._kernels_key(), nccl_settings.link_key({})])
    assert interpreter.packages_changed() == 2 * 10**9
    assert keys[0][0] != keys[1][0] and keys[0][1] != keys[1][1]


def test_a_shape_is_read_again_once_a_package_of_ours_is_installed_anew(tmp_path, monkeypatch):
    """Of the same version, as yunchang where it was broken: its rings would be left out for good."""
    packages = tmp_path / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    monkeypatch.delenv(interpreter.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    keys = []
    for seconds in (1, 2):
        os.utime(packages, (seconds, seconds))
        keys.append(measurements._shape_key(ModelChoice(str(tmp_path / "m.safetensors")), "cpu", [0]))
    assert keys[0] != keys[1]


def test_the_agent_is_started_with_it_and_without_our_packages(chosen, tmp_path):
    assert agent_command(2, tmp_path)[:3] == [chosen, "-m", "torch.distributed.run"]
    ours = {**os.environ, "PYTHONPATH": "/ours", "PYTHONHOME": "/home", "HOME": "/h"}
    env = sanitized_environment(ours, ParallelConfig(), "cpu")
    assert "/ours" not in env["PYTHONPATH"] and "PYTHONHOME" not in env and env["HOME"] == "/h"


@pytest.mark.parametrize("value", ["python3", "/no/such/python", "/tmp"])
def test_what_is_no_interpreter_is_refused(monkeypatch, value):
    monkeypatch.setenv(interpreter.VARIABLE, value)
    with pytest.raises(ConfigError, match="absolute path; name the python of an environment"):
        interpreter.ranks_python()


def test_it_is_asked_for_its_packages(chosen, tmp_path):
    require_dependencies(python=chosen)
    assert "-m backend.client.launching.dependencies" in (tmp_path / "log").read_text()
    (tmp_path / "requirements.txt").write_text("no-such-package>=1\n")
    with pytest.raises(MissingDependencyError) as missing:
        require_dependencies(tmp_path / "requirements.txt", chosen)
    assert f'"{chosen}" -m pip install "no-such-package>=1"' in str(missing.value)
    assert "PARALLEL_DIT_PYTHON" in str(missing.value)


def test_what_it_prints_of_its_own_is_no_answer(tmp_path):
    python = str(interpreters.loud(tmp_path / "python"))
    require_dependencies(python=python)
    (tmp_path / "requirements.txt").write_text("no-such-package>=1\n")
    with pytest.raises(MissingDependencyError, match="no-such-package"):
        require_dependencies(tmp_path / "requirements.txt", python)


def test_one_that_is_too_old_is_told_so_and_not_what_it_lacks(tmp_path):
    """pip would say that there is no matching distribution."""
    with pytest.raises(MissingDependencyError, match="or newer, .* is 3.10.12; set it to a") as missing:
        require_dependencies(python=str(interpreters.old(tmp_path / "python")))
    assert "pip install" not in str(missing.value)


def test_one_that_is_no_python_is_named(tmp_path):
    python = str(interpreters.broken(tmp_path / "python"))
    with pytest.raises(BackendError, match="could not be asked for its packages"):
        require_dependencies(python=python)
