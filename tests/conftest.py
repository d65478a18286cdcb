"""Makes the pack importable as ``parallel_dit``, with no ComfyUI around."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads only get in each other's way

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import pack  # noqa: E402, F401


def pytest_collection_finish():
    """What is imported stays: no garbage collection looks through it again."""
    gc.freeze()
