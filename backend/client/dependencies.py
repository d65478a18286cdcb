"""Reports in one sentence what the backend needs and ComfyUI's environment lacks."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from ..errors import SHORT

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
#: Where a package is imported by another name than it is installed by.
_IMPORT_NAMES = {"pillow": "PIL"}


class MissingDependencyError(ImportError):
    """A package of requirements.txt is absent or too old; the message has the command that installs it."""

    __module__ = SHORT


def require_dependencies(requirements: Path = REQUIREMENTS):
    """Raise MissingDependencyError where this interpreter, which also runs the ranks, lacks a package."""
    unmet = unmet_requirements(requirements)
    if unmet:
        raise MissingDependencyError(
            f"The parallel backend needs {', '.join(unmet)}, which ComfyUI's Python does not have; run: "
            f"{pip(unmet)}"
        )


def unmet_requirements(requirements: Path = REQUIREMENTS) -> list[str]:
    """Return the lines of a requirements.txt that this interpreter does not meet."""
    lines = [line.split("#")[0].strip() for line in requirements.read_text().splitlines()]
    return [line for line in filter(None, lines) if not _is_met(line)]


def _is_met(requirement: str) -> bool:
    """Return whether "name" or "name>=1.2.3" is installed, the only forms in requirements.txt."""
    name, _, least = requirement.partition(">=")
    if importlib.util.find_spec(_IMPORT_NAMES.get(name, name)) is None:
        return False
    return not least or _numbers(importlib.metadata.version(name)) >= _numbers(least)


def _numbers(version: str) -> list[int]:
    digits = re.match(r"[\d.]+", version)
    assert digits, f"the version {version!r} does not begin with a number"
    return [int(number) for number in digits[0].strip(".").split(".")]


def pip(unmet: list[str]) -> str:
    """The command that installs packages for this interpreter."""
    return f'"{sys.executable}" -m pip install ' + " ".join(f'"{line}"' for line in unmet)
