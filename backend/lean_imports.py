"""Imports torch and diffusers' transformers without packages that no rank uses, which took a third of a
rank's start, and without garbage collections, which took a fifth of the rest: imports leave no garbage.

diffusers imports transformers and SciPy where they are installed, for pipelines, LoRA loaders and schedulers.
A None in ``sys.modules`` makes a package absent (importlib's documentation); later imports find it again.
"""

import gc
import importlib
import sys

#: What all transformers of diffusers do without.
UNUSED = ("transformers", "scipy")


def import_diffusers():
    """Import diffusers' transformers as if UNUSED were not installed, unless diffusers is there already."""
    if "diffusers" in sys.modules:
        return
    hidden = [name for name in UNUSED if name not in sys.modules]
    absent: dict[str, None] = dict.fromkeys(hidden)
    sys.modules.update(absent)  # pyright: ignore[reportCallIssue, reportArgumentType]  # documented
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("diffusers.models.transformers")
    finally:
        for name in hidden:
            del sys.modules[name]
        if collects:
            gc.enable()


import_diffusers()
