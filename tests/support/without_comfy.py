"""Modules of nodes/host on stand-ins for ComfyUI's modules: the unit tests run without ComfyUI."""

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType

import pack  # noqa: F401  # makes parallel_dit importable
import pytest

HOST = "parallel_dit.nodes"
COMFYUI = (
    "folder_paths",
    "nodes",
    "comfy",
    "comfy.model_management",
    "comfy.utils",
    "comfy.weight_adapter",
    "comfy_execution",
    "comfy_execution.progress",
    "comfy_execution.utils",
)


class StandIn(ModuleType):
    """Has whatever is asked for: a class of that name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


@contextmanager
def on_stand_ins(name: str):
    """Give the module ``name`` of nodes/, imported on stand-ins, of which no trace stays."""
    with pytest.MonkeyPatch.context() as patch:
        for each in COMFYUI:
            module = StandIn(each)
            patch.setitem(sys.modules, each, module)
            parent, _, child = each.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        before = set(sys.modules)
        yield importlib.import_module(f"{HOST}.{name}")
        for imported in set(sys.modules) - before:
            if imported.startswith(HOST):
                del sys.modules[imported]
