"""Whether packages can be imported that scripts/doctor.py asks about: a broken one may end its process."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Packages whose import is tried -> what it is imported by. A wheel built for another torch fails only then.
WHEELS = {
    "diffusers": "diffusers.models.transformers",
    "yunchang": "yunchang",
    "flash-attn": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute.interface",
    "sageattention": "sageattention",
    "sageattn3": "sageattn3",
    "comfy-kitchen": "comfy_kitchen",
    "gguf": "gguf",
}
#: Package -> how it is imported where that is not all of it.
HOW = {
    "diffusers": "from backend.runtime import lean_imports",
    "yunchang": "from backend.parallel.attention.ring_library import ring_library; ring_library()",
}
#: Package -> the kernel that it has, of Parallel Config's attention.
KERNELS = {
    "flash-attn": "flash-attn",
    "flash_attn_3": "flash-attn-3",
    "flash-attn-4": "flash-attn-4",
    "sageattention": "sage",
    "sageattn3": "sage-3",
}
#: Begins the line in which a package's process says why its kernel is refused.
REFUSED = "refused: "
#: Version of a package without a distribution of its name.
UNKNOWN = "of unknown version"
IMPORT_SECONDS = 60.0


def remedy(error: ImportError | OSError | ValueError) -> str:
    """Return what to do about a package that is not there. OSError and ValueError are of a torch that lacks
    its libraries."""
    from backend.runtime.install_command import TOGETHER, install_command  # which needs none

    rest = install_command(["-r", str(ROOT / "requirements.txt")])
    return f"{TOGETHER}; then run: {rest}" if getattr(error, "name", "torch") == "torch" else f"run: {rest}"


@dataclass(frozen=True)
class Wheel:
    """A package: its version, what its import raised (empty: nothing), whether that took too long, and why
    its attention kernel is refused all the same (empty: it is not)."""

    version: str
    error: str = ""
    is_slow: bool = False
    refusal: str = ""


def tried(name: str) -> Wheel:
    """Import a package of WHEELS after torch, in another process."""
    version = _version(name)
    # Python need not import from its working folder (PYTHONSAFEPATH, a ._pth file)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import torch"
    code += f"; {HOW.get(name, f'import {WHEELS[name]}')}"
    if name in KERNELS:
        code += "; from backend.parallel.attention.kernel_choice import why_uncallable"
        code += f"; print({REFUSED!r}, why_uncallable({KERNELS[name]!r}) or '', sep='')"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return Wheel(version, is_slow=True)
    if done.returncode == 0:
        lines = done.stdout.splitlines()
        refusals = [line.removeprefix(REFUSED) for line in lines if line.startswith(REFUSED)]
        return Wheel(version, refusal="".join(refusals))
    if done.returncode < 0:
        return Wheel(version, f"its import was ended by signal {-done.returncode}")
    return Wheel(version, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:300])


def is_installed(name: str) -> bool:
    """Return whether a package of WHEELS is here. Two of them share the folder flash_attn, which does not
    tell whose it is: they need a distribution of their own."""
    top = _top(WHEELS[name])
    shared = Counter(map(_top, WHEELS.values()))[top] > 1
    return importlib.util.find_spec(top) is not None and not (shared and _version(name) == UNKNOWN)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN
