"""The models on which ComfyUI's own LoRA loaders are tried."""

import pytest
from comfy_modules import comfy_modules
from parallel_dit.nodes.host import stock_loras

with comfy_modules():
    import comfy.sd


@pytest.fixture
def flux(flux, monkeypatch, tmp_path):
    """The pair of models, with files of LoRAs where the ranks of tests may read."""
    monkeypatch.setattr(stock_loras, "folder", lambda: str(tmp_path))
    # ComfyUI before 0.8 takes every Flux for one of the released width
    monkeypatch.setitem(flux.ours.model.model_config.unet_config, "hidden_size", 256)
    return flux


def with_loras(model, *files, strength=0.8):
    """The model after a LoraLoader for each of these state dictionaries."""
    for file in files:
        model, _ = comfy.sd.load_lora_for_models(model, None, dict(file), strength, 0.0)
    return model
