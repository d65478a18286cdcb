"""Makes the pack importable as ``parallel_dit``, with no ComfyUI around."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import pack  # noqa: E402, F401
