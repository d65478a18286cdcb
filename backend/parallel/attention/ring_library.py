"""yunchang's ring, from its file alone: the package imports every kernel package that is installed, of which
one that is broken, or asks for a GPU where none is visible, would end rings that need none."""

import importlib.util
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch

from ...errors import reason
from ...runtime.callbacks import unchanged

LIBRARY, RING = "yunchang", Path("ring", "utils.py")


@cache
def ring_library() -> ModuleType:
    """Return the module with yunchang's update_out_and_lse. Raises ImportError, or what its file raises."""
    package = PathFinder.find_spec(LIBRARY)
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named '{LIBRARY}'")
    path = Path(package.submodule_search_locations[0], RING)
    spec = importlib.util.spec_from_file_location(f"{LIBRARY}_ring", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    script = torch.jit.script
    # TorchScript would have NVRTC compile the merge in the midst of a ring, and is not for Python 3.14
    torch.jit.script = unchanged
    try:
        spec.loader.exec_module(module)
    finally:
        torch.jit.script = script
    return module


def ring_unavailable() -> str | None:
    """Say why there is no ring attention, as one sentence; None where there is."""
    try:
        ring_library()
    except Exception as error:  # whatever its file, or an older or newer package, raises
        return (
            f"ring_degree is above 1, but the package {LIBRARY} cannot be used ({type(error).__name__}: "
            f"{reason(error)}); reinstall it, or set ring_degree to 1 and raise ulysses_degree."
        )
    return None
