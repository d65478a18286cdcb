"""ComfyUI's own detection of released files, by their headers."""

from typing import Any

import torch
from comfy_modules import comfy_modules
from headers import HeaderFiles, released
from torch import Tensor

with comfy_modules():
    import comfy.model_detection


def detected(name: str) -> tuple[Any, dict[str, Tensor]] | None:
    """Return ComfyUI's configuration of a released file, whose models have no weights, and the transformer's
    tensors by their keys without prefix; None for a file that it does not know."""
    files = HeaderFiles(name, released()[name])
    state = {key: torch.empty(shape, device="meta") for key, shape in files.shapes.items()}
    prefix = comfy.model_detection.unet_prefix_from_state_dict(state)
    prefix = prefix if any(key.startswith(prefix) for key in state) else ""
    found = comfy.model_detection.detect_unet_config(state, prefix, metadata=files.metadata)
    config = comfy.model_detection.model_config_from_unet_config(found, state) if found else None
    if config is None:
        return None
    config.unet_config["disable_unet_model_creation"] = True
    return config, {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
