"""The Python that runs the ranks: ours, or one that the user chooses, and how it answers questions."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...config import ConfigError

#: The folder of this pack.
PACK = Path(__file__).resolve().parents[3]
#: Environment variable with the path of another interpreter, whose packages the ranks then use.
VARIABLE = "PARALLEL_DIT_PYTHON"
#: Begins an answer on standard output, where whatever starts with a Python (sitecustomize) may print, too.
ANSWER = "parallel-dit answers "
#: What belongs to our interpreter: another one would import from its packages.
OWN = ("PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__")


def ranks_python() -> str:
    """Return the interpreter of ranks, probes and readers of headers. Raises ConfigError where the variable
    names none."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if not chosen:
        return sys.executable
    path = Path(chosen).expanduser()
    if not (path.is_absolute() and path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(
            f"{VARIABLE} is {chosen!r:.200}, which is no program's absolute path; name the python of an "
            f"environment, like /opt/ranks/bin/python, or clear it to use ComfyUI's."
        )
    return str(path)


def packages_changed() -> int:
    """Return when packages were last installed for the ranks' Python (nanoseconds), whose versions are not
    known here; 0 where it is ours."""
    python = ranks_python()
    return 0 if python == sys.executable else installed_at(python)


def installed_at(python: str) -> int:
    """Return when packages were last installed for an interpreter (nanoseconds), 0 where nobody knows."""
    folders = Path(python).parent.parent.glob("lib/python3*/site-packages")
    return max((folder.stat().st_mtime_ns for folder in folders), default=0)


def inherited(parent: Mapping[str, str]) -> dict[str, str]:
    """Return what of the environment ``parent`` is for the ranks' interpreter."""
    if ranks_python() == sys.executable:
        return dict(parent)
    return {name: value for name, value in parent.items() if name not in OWN}


def answer(value: Any) -> str:
    """Return the line with which a process answers ``value``, which JSON has."""
    return ANSWER + json.dumps(value)


def answered(lines: Iterable[str]) -> Any:
    """Return the first answer among the lines of a process's standard output; None where there is none."""
    for line in lines:
        _, mark, text = line.partition(ANSWER)
        if mark:
            return json.loads(text)
    return None
