"""Imports diffusers' transformers, and torch with them, without packages that no rank uses.

These packages took a third of a rank's start: diffusers imports transformers, PEFT and SciPy where they are
installed, for pipelines, LoRA loaders and schedulers. It also imports packages for quantization and
attention. Many an installation has one of these that was built for another torch, and it would end each rank
(diffusers issue 10940). A None in ``sys.modules`` makes a package absent (importlib's documentation); later
imports find it again. PEFT cannot be imported without transformers.

Garbage collection is off meanwhile: it took a fifth of the rest, and imports leave no garbage.
"""

import gc
import importlib
import logging
import sys

TRANSFORMERS = "diffusers.models.transformers"
#: What all of these do without.
UNUSED = (
    *("transformers", "peft", "scipy"),
    *("bitsandbytes", "torchao", "optimum", "modelopt", "sdnq", "xformers", "kernels"),
)


def import_diffusers():
    """Import diffusers' transformers as if UNUSED were not installed, unless diffusers is there already; as
    they are where that fails, since another package needs one of them."""
    if "diffusers" in sys.modules:
        return
    hidden = [name for name in UNUSED if name not in sys.modules]
    absent: dict[str, None] = dict.fromkeys(hidden)
    sys.modules.update(absent)  # pyright: ignore[reportCallIssue, reportArgumentType]  # documented
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(TRANSFORMERS)
    except Exception:  # of a package that looks into one of them, whatever it raises
        for name in [name for name in sys.modules if name.partition(".")[0] == "diffusers"]:
            del sys.modules[name]
        logging.getLogger("diffusers").handlers.clear()  # it gets another
    finally:
        for name in hidden:
            del sys.modules[name]
        if collects:
            gc.enable()
    importlib.import_module(TRANSFORMERS)


import_diffusers()
