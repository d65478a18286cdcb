"""The folder of what is measured or compiled once for this machine and user."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return parallel-dit in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "parallel-dit"
