"""Stand-ins for another environment's Python."""

import sys
from pathlib import Path

import forking

from backend.client.launching.interpreter import answer


def recording(path: Path, log: Path, forks: bool = False) -> Path:
    """Write a program that is this Python, and writes to ``log`` what it is asked to run. ``forks``: what can
    be forked is (tests/support/forking_agent), which nothing in our PYTHONPATH says to it."""
    place = f'export PYTHONPATH="$PYTHONPATH:{forking.FOLDER}"\n' if forks else ""
    return _program(path, f'echo "$@" >> "{log}"\n{place}exec "{sys.executable}" "$@"')


def loud(path: Path) -> Path:
    """Write a program that is this Python, and prints before it begins."""
    return _program(path, f'echo [patched]\nexec "{sys.executable}" "$@"')


def old(path: Path) -> Path:
    """Write a program that answers as a Python 3.10 does, which lacks a package."""
    line = answer({"python": [3, 10, 12], "unmet": ["diffusers>=0.42.1"]})
    return _program(path, f"echo '{line}'")


def broken(path: Path) -> Path:
    """Write a program that is no Python."""
    return _program(path, "echo what; exit 3")


def _program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
