"""Older versions of ComfyUI lack families and nodes: tests of those are skipped with the reason, and fail where a version that should have them has not."""

import re

import pytest
from comfy_modules import ROOT

#: The version that has all that the tests use.
COMPLETE = (0, 33)


def skip_without(missing):
    """Skip the test where ``missing``, names of what it needs, is not empty and this ComfyUI is an older one."""
    version = re.search(r'"([\d.]+)"', (ROOT / "comfyui_version.py").read_text())[1]
    if missing and tuple(map(int, version.split("."))) < COMPLETE:
        pytest.skip(f"ComfyUI {version} has no {', '.join(sorted(missing))}")


def skip_without_nodes(prompt: dict, known: dict):
    """The same for the nodes of an API graph and their inputs, beside ``known``, ComfyUI's /object_info."""
    used = [(node["class_type"], name) for node in prompt.values() for name in node["inputs"]]
    has = lambda kind, name: any(name in known[kind]["input"].get(part, {}) for part in ("required", "optional"))
    skip_without({kind for kind, _ in used if kind not in known} | {f"input {name} of {kind}" for kind, name in used if kind in known and not has(kind, name)})


def skip_without_class(name: str):
    """The same for a class of comfy.supported_models, or one of the pack's own."""
    import comfy.supported_models
    from parallel_dit.nodes.families import OURS

    skip_without([] if name in OURS or hasattr(comfy.supported_models, name) else [name])
