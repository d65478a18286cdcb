"""Released files by their headers: ComfyUI's own detection, sampling and latent format next to those of this
pack's model object. tests/headers/comfy.json keeps them for docs/models.md.

    COMFYUI_PATH=~/ComfyUI python tests/comfy/test_released_files.py     # writes it, with ComfyUI's Python
"""

import json
from pathlib import Path

import pytest
import torch
from comfy_modules import comfy_modules
from header_forms import forms, open_released
from headers import HeaderFiles, released
from versions import skip_without_class

from backend.protocol import Loaded

with comfy_modules():
    import comfy.model_detection
    import comfy.supported_models
    from parallel_dit.nodes.comfy_models.registry import FAMILIES, weightless_patcher

HEADERS = Path(__file__).parents[1] / "headers"
#: File -> [family, parameters, leftovers], or its refusal.
TABLE = json.loads((HEADERS / "released.json").read_text())
#: File -> [ComfyUI's class, type of its sampling, its settings, latent format].
COMFY = json.loads((HEADERS / "comfy.json").read_text())
TAKEN = [name for name, row in TABLE.items() if isinstance(row, list)]
#: Files that ComfyUI 0.33 does not take, for their prefix.
UNKNOWN = ("var__flux1-dev_prefixed_diffusion_model",)


def described(model, name: str) -> list:
    """[ComfyUI's class, type of sampling, settings, latent format] of a ComfyUI model object."""
    settings = {
        key: value for key, value in model.model_config.sampling_settings.items() if value is not None
    }
    kinds = [base.__name__ for base in type(model.model_sampling).__mro__[1:3]]
    return [name, kinds, settings, type(model.latent_format).__name__]


def ours(name: str) -> list:
    """The same of this pack's model object for a released file."""
    checkpoint = open_released(name)
    info = {
        "config": json.loads(json.dumps(checkpoint.config)),
        "conditioning": list(checkpoint.family.conditioning.accepted),
        "latent_format": checkpoint.latent_format,
        "generic": checkpoint.generic,
        "dtype": "float32",
    }
    model = weightless_patcher(Loaded("m", checkpoint.family.name, info)).model
    return described(model, FAMILIES[checkpoint.family.name].class_name(checkpoint.config))


def theirs(name: str) -> list | None:
    """The same of ComfyUI's own, detected by the header; None for a file that it does not know."""
    files = HeaderFiles(name, released()[name])
    state = {key: torch.empty(shape, device="meta") for key, shape in files.shapes.items()}
    prefix = comfy.model_detection.unet_prefix_from_state_dict(state)
    prefix = prefix if any(key.startswith(prefix) for key in state) else ""
    found = comfy.model_detection.detect_unet_config(state, prefix, metadata=files.metadata)
    config = comfy.model_detection.model_config_from_unet_config(found, state) if found else None
    if config is None:
        return None
    config.unet_config["disable_unet_model_creation"] = True
    return described(config.get_model({}), type(config).__name__)


@pytest.mark.full
@pytest.mark.parametrize("name", TAKEN)
def test_sampling_and_latents_are_comfyuis(name):
    skip_without_class(COMFY[name][0])
    found = ours(name)
    assert json.loads(json.dumps(found)) == COMFY[name]
    if name in forms()["folders"] or "diffusers_names" in name:  # of which ComfyUI reads few
        return
    header = forms()["gguf"].get(name, {"header": name})["header"]  # ComfyUI-GGUF hands on names and shapes
    assert theirs(header) == (None if name in UNKNOWN else found)


def test_every_taken_file_is_listed():
    assert list(COMFY) == TAKEN
