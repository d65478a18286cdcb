"""Reports in one sentence what the backend needs and ComfyUI's environment lacks."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import SHORT
from ...protocol import BackendError
from ...runtime.install_command import TORCH, how_to_install
from ...runtime.torch_version import installed
from .interpreter import PACK, VARIABLE, answer, answered, inherited, installed_at, ranks_python

#: That of requires-python: packages of requirements.txt have no release for older ones.
OLDEST_PYTHON = (3, 11)
REQUIREMENTS = PACK / "requirements.txt"
#: Not in requirements.txt, of which pip would take another build than ComfyUI's.
NEEDED_TORCH = "torch>=2.6"
#: What a torch without one lacks: diffusers, which asks importlib.metadata for it, has stand-ins of its
#: models then.
NEEDED_DISTRIBUTION = f"{NEEDED_TORCH} with its dist-info, by which diffusers finds it"
#: Packages that decide how a step is divided on ranks.
DIVIDING = ("torch", "diffusers", "yunchang")
#: An interpreter answers within this long, also from a cold network disk.
ASK_SECONDS = 120
#: Where a package is imported by another name than it is installed by.
_IMPORT_NAMES = {"pillow": "PIL"}
#: Interpreters, requirements of which they have everything, and when packages were last installed for them.
_complete: set[tuple[str, Path, int]] = set()


class MissingDependencyError(ImportError):
    """A package of requirements.txt is absent or too old; the message has the command that installs it."""

    __module__ = SHORT


def require_dependencies(requirements: Path = REQUIREMENTS, python: str = sys.executable):
    """Raise MissingDependencyError where the interpreter ``python`` lacks a package: this one, or the ranks'
    (interpreter.ranks_python). Raises BackendError where that does not run."""
    if python == sys.executable:
        _require_python(sys.version_info[:3], "ComfyUI's", f"run ComfyUI with a newer one, or set {VARIABLE}")
    known = (python, requirements, installed_at(python))
    if known in _complete:
        return
    if python == sys.executable:
        whose = "ComfyUI's Python"
        unmet = unmet_requirements(requirements)
    else:
        whose = f"{python} ({VARIABLE})"
        unmet = _asked(python, requirements)["unmet"]
    if unmet:
        raise MissingDependencyError(
            f"The parallel backend needs {', '.join(unmet)}, which {whose} does not have; "
            f"{how_to_install(unmet, python)}"
        )
    _complete.add(known)


def _require_python(version: Sequence[int], whose: str, remedy: str):
    if tuple(version) < OLDEST_PYTHON:
        raise MissingDependencyError(
            f"The parallel backend needs Python 3.11 or newer, as diffusers and transformers do, but {whose} "
            f"is {'.'.join(map(str, version))}; {remedy} to a Python that has what requirements.txt lists "
            f"(docs/dependencies.md)."
        )


def ranks_versions() -> dict[str, str]:
    """Return the versions of the ranks' Python and of its DIVIDING packages. Raises BackendError."""
    python = ranks_python()
    return _versions() if python == sys.executable else _asked(python, REQUIREMENTS)["versions"]


def _versions() -> dict[str, str]:
    found = {name: installed(name) or "none" for name in DIVIDING}
    return {"python": sys.version.split()[0], **found}


def _asked(python: str, requirements: Path) -> dict:
    """Return what another interpreter answers as this module does when it runs."""
    command = [python, "-m", "backend.client.launching.dependencies", str(requirements.absolute())]
    environment = {**inherited(os.environ), "PYTHONPATH": str(PACK)}
    try:
        # in our folder: whatever is called backend where we run is not ours
        asked = subprocess.run(
            command, cwd=PACK, env=environment, capture_output=True, text=True, timeout=ASK_SECONDS
        )
        answer = answered(asked.stdout.splitlines())
        if answer is None:
            raise ValueError(asked.stderr.strip().rpartition("\n")[2] or f"it ended with {asked.returncode}")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        what = f"{VARIABLE} names {python}, which could not be asked for its packages"
        raise BackendError(f"{what} ({error!s:.200}); it has to be Python 3.11 or newer.") from error
    _require_python(answer["python"], f"{python} ({VARIABLE})", "set it")
    return answer


def unmet_requirements(requirements: Path = REQUIREMENTS) -> list[str]:
    """Return what this interpreter does not meet of NEEDED_TORCH and the lines of a requirements.txt."""
    listed = [re.split("[#;]", line)[0].strip() for line in requirements.read_text().splitlines()]
    needed = NEEDED_TORCH
    if importlib.util.find_spec(TORCH) is not None and not installed(TORCH):
        needed = NEEDED_DISTRIBUTION
    return [line for line in [needed, *filter(None, listed)] if not _is_met(line)]


def _is_met(requirement: str) -> bool:
    """Return whether "name" or "name>=1.2.3" is installed, the only forms in requirements.txt."""
    name, _, least = requirement.partition(">=")
    if importlib.util.find_spec(_IMPORT_NAMES.get(name, name)) is None:
        return False
    version = installed(name)
    return not least or (bool(version) and _numbers(version) >= _numbers(least))


def _numbers(version: str) -> list[int]:
    digits = re.match(r"[\d.]+", version)
    assert digits, f"the version {version!r} does not begin with a number"
    return [int(number) for number in digits[0].strip(".").split(".")]


if __name__ == "__main__":
    unmet = unmet_requirements(Path(sys.argv[1]))
    print(answer({"python": sys.version_info[:3], "unmet": unmet, "versions": _versions()}))
