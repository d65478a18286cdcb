"""Older versions of ComfyUI lack families and nodes: tests of those are skipped with the reason, and fail
where a version that should have them has not."""

import re

import pytest
from comfy_modules import ROOT

#: The version that has all that the tests use, and what came later.
COMPLETE = (0, 33)
LATER = dict.fromkeys(("QwenImage21", "TextEncodeQwenImage21", "QwenImage21Cache"), (0, 37))


def skip_without(missing):
    """Skip the test where this ComfyUI is older than what brought one of ``missing``, names of what the test
    needs."""
    version = re.search(r'"([\d.]+)"', (ROOT / "comfyui_version.py").read_text())[1]
    young = sorted(
        name for name in missing if tuple(map(int, version.split("."))) < LATER.get(name, COMPLETE)
    )
    if young:
        pytest.skip(f"ComfyUI {version} has no {', '.join(young)}")


def skip_without_nodes(prompt: dict, known: dict):
    """The same for the nodes of an API graph and their inputs, besides ``known``, ComfyUI's /object_info."""
    used = [(node["class_type"], name) for node in prompt.values() for name in node["inputs"]]

    def has(kind, name):
        return any(name in known[kind]["input"].get(part, {}) for part in ("required", "optional"))

    skip_without(
        {kind for kind, _ in used if kind not in known}
        | {f"input {name} of {kind}" for kind, name in used if kind in known and not has(kind, name)}
    )


def skip_without_noise_of_its_own():
    """The same for a seed of a sampler's noise that is not the latent's, as golden latents have it."""
    if "seed += 1" not in (ROOT / "comfy/k_diffusion/sampling.py").read_text():
        skip_without(["seed of its own for a sampler's noise"])


def skip_without_class(name: str):
    """The same for a class of comfy.supported_models, or one of the pack's own."""
    import comfy.supported_models
    from parallel_dit.nodes.comfy_models.registry import OURS

    skip_without([] if name in OURS or hasattr(comfy.supported_models, name) else [name])
