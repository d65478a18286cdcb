"""The commands that install packages for an interpreter. Standard library only."""

import sys
from collections.abc import Iterable
from pathlib import Path

#: Built for one driver, and for torchvision and torchaudio, without which ComfyUI does not start.
TORCH = "torch"
TOGETHER = "install torch, torchvision and torchaudio together, as pytorch.org says for your driver"


def install_command(packages: Iterable[str], python: str = sys.executable, upgrade: bool = False) -> str:
    """Return the command that installs ``packages`` ("name" or "name>=1.2") for the interpreter ``python``:
    uv's where that has no pip, as in environments that uv makes."""
    names = " ".join(f'"{each}"' for each in packages)
    option = "--upgrade " if upgrade else ""
    if _has_pip(python):
        return f'"{python}" -m pip install {option}{names}'
    return f'uv pip install --python "{python}" {option}{names}'


def how_to_install(requirements: list[str], python: str = sys.executable) -> str:
    """Return what to do about requirements that an interpreter does not meet, in words."""
    plain = [each for each in requirements if each.partition(">=")[0] != TORCH]
    steps = [TOGETHER] if len(plain) < len(requirements) else []
    steps += [f"run: {install_command(plain, python)}"] if plain else []
    return "; then ".join(steps)


def _has_pip(python: str) -> bool:
    environment = Path(python).parent.parent
    is_virtual = (environment / "pyvenv.cfg").is_file()
    return not is_virtual or any(environment.glob("lib/python3*/site-packages/pip"))
