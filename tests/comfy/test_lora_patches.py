"""LoRAs as they are published, by their key lists: how many tensors ComfyUI's own loader changes."""

import json
from pathlib import Path

import pytest
import torch
from comfy_modules import comfy_modules
from detection import detected
from lora_lists import key_lists, keys_of
from versions import skip_without_class

with comfy_modules():
    import comfy.lora
    import comfy.lora_convert

HEADERS = Path(__file__).parents[1] / "headers"
LISTS = key_lists()
#: Released file -> [ComfyUI's class, ...].
CLASSES = json.loads((HEADERS / "comfy.json").read_text())
#: List -> tensors that ComfyUI changes.
COMFY = json.loads((HEADERS / "comfy_loras.json").read_text())


def targets_of(name: str) -> dict:
    """ComfyUI's own map of keys to weights, for a released file; empty where it does not know the model."""
    found = detected(name)
    if found is None:
        return {}
    config, state = found
    own = config.process_unet_state_dict(state)
    model = config.get_model({})
    model.state_dict = lambda: {f"diffusion_model.{key}": value for key, value in own.items()}
    return comfy.lora.model_lora_keys_unet(model, {})


def patches(name: str) -> int:
    """How many tensors ComfyUI changes by a list."""
    entry = LISTS[name]
    keys = {
        key: torch.empty(shape, device="meta") if shape else torch.tensor(1.0)
        for key, (_, shape) in keys_of(entry).items()
    }
    return len(comfy.lora.load_lora(comfy.lora_convert.convert_lora(keys), targets_of(entry.model), False))


@pytest.mark.full
@pytest.mark.parametrize("name", COMFY)
def test_comfyui_changes_as_many(name):
    skip_without_class(CLASSES[LISTS[name].model][0])
    assert patches(name) == COMFY[name]
