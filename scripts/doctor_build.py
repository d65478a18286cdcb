"""What a report of scripts/doctor.py is read by: versions of this pack and of libraries, CPU and system."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from backend.hardware.device_memory import host_bytes
from backend.hardware.host_system import is_wsl
from backend.runtime.torch_version import installed

ROOT = Path(__file__).resolve().parents[1]
GIT_SECONDS = 10.0
#: What Docker and Podman put into their containers.
OF_CONTAINERS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def build() -> dict[str, str]:
    """Return each in a word or two, empty where it does not apply."""
    signs = {"WSL": is_wsl(), "container": any(place.exists() for place in OF_CONTAINERS)}
    signs["Kubernetes"] = "KUBERNETES_SERVICE_HOST" in os.environ
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else ""
    return {
        "pack": version_of(ROOT),
        "cudnn": str(cudnn or ""),
        "triton": installed("triton"),
        "cpu": _cpu(),
        "system": ", ".join(name for name, here in signs.items() if here),
        "memory": f"{host_bytes() / 1e9:.0f} GB",
        "swap": f"{psutil.swap_memory().total / 1e9:.0f} GB",
    }


def version_of(folder: Path) -> str:
    """Return the commit of the pack in a folder, or its version where that is no clone."""
    if (folder / ".git").exists():  # elsewhere git describes the repository around it, as ComfyUI's
        # whose clone it is does not matter: this process runs its code already
        command = ["git", "-c", "safe.directory=*", "-C", str(folder), "describe", "--always", "--dirty"]
        with suppress(OSError, subprocess.SubprocessError):
            described = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
            if described.returncode == 0:
                return described.stdout.strip()
    try:
        return re.findall(r'^version = "(.*)"', (folder / "pyproject.toml").read_text(), re.MULTILINE)[0]
    except (OSError, IndexError):
        return "unknown"


def _cpu() -> str:
    """Return the model of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )
