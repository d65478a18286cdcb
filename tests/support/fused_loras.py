"""Fuses LoRAs into a loaded model, and tells what they changed."""

import torch
from quantized import weights_of
from safetensors.torch import save_file

from backend.loading.lora.lora_keys import lora_stack

STRENGTH = 0.7


def parameters(engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in weights_of(engine.models["m"].transformer).items()}


def fuse(engine, *loras):
    engine.fused(engine.add_lora_stack("m", lora_stack(loras)))


def equal(a, b) -> bool:
    """The same bits: what is read from the file again."""
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def write(path, tensors) -> str:
    save_file(tensors, path)
    return str(path)


def change(flux, path, tensors, strength=STRENGTH) -> dict[str, torch.Tensor]:
    """What a file changes of the tiny Flux, by parameter."""
    plain = parameters(flux)
    fuse(flux, (write(path, tensors), strength))
    changes = {
        name: value - plain[name] for name, value in parameters(flux).items() if not value.equal(plain[name])
    }
    fuse(flux)
    assert equal(parameters(flux), plain)
    return changes
