"""Makes the pack importable as ``parallel_dit``, as ComfyUI imports it (by its folder, whatever that is
called), without ComfyUI."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if "parallel_dit" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "parallel_dit", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    sys.modules["parallel_dit"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["parallel_dit"])
