"""Which kind of Linux this is, of those on which CUDA behaves in a way of its own."""

import platform
import sys
from pathlib import Path

#: Of NVIDIA's Linux for Jetson; a container has the kernel's name alone.
TEGRA_RELEASE = Path("/etc/nv_tegra_release")


def is_wsl() -> bool:
    """Return whether this is the Linux of Windows, whose driver manages the memory of GPUs."""
    return sys.platform == "linux" and "microsoft" in platform.release().lower()


def is_tegra() -> bool:
    """Return whether this is a Jetson."""
    return TEGRA_RELEASE.exists() or "tegra" in platform.release()
