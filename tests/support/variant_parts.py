"""What the entries of variants.py are made of: a variant, reference latents and masks."""

from dataclasses import dataclass, field

import torch
from tiny import facts

from backend.protocol import REFERENCE_METHODS


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def frames_given(channels: int, frames: int, height: int, width: int) -> torch.Tensor:
    """A denoise mask that keeps the first frame and half of the second."""
    mask = torch.ones(1, channels, frames, height, width)
    mask[:, :, 0], mask[:, :, 1, : height // 2] = 0.0, 0.0
    return mask


@dataclass(frozen=True)
class Variant:
    """shapes: keys of the checkpoint that differ from the golden family's (None: absent). unet: entries of
    ComfyUI's unet_config that differ.
    latent: shape of the noise, where it is not the golden one's. arguments: model arguments of both branches;
    negative: of the negative one alone. louder: factor of the
    last layer, for another model of the same shapes."""

    family: str
    shapes: dict = field(default_factory=dict)
    comfy_class: str = ""
    unet: dict = field(default_factory=dict)
    latent: tuple[int, ...] | None = None
    arguments: dict = field(default_factory=dict)
    negative: dict = field(default_factory=dict)
    mask: torch.Tensor | None = None
    louder: float = 1.0


REFERENCES = {"ref_latents.0": randn(1, 16, 11, 14), "ref_latents.1": randn(1, 16, 8, 20)}
WIDE_REFERENCES = {"ref_latents.0": randn(1, 128, 7, 5), "ref_latents.1": randn(1, 128, 4, 11)}
SPLICED = {"ref_latents.0": randn(1, 64, 4, 8), "ref_latents.1": randn(1, 64, 6, 6)}
VIDEO_REFERENCES = {name: value.unsqueeze(2) for name, value in REFERENCES.items()}
METHOD = {name: {"ref_latents_method": torch.tensor(i)} for i, name in enumerate(REFERENCE_METHODS)}
GUIDANCE = {
    f"guidance_in.{layer}.{leaf}": None for layer in ("in_layer", "out_layer") for leaf in ("weight", "bias")
}


def wider(family: str, by: int, to: int) -> dict:
    """The shapes of a golden family whose widths are ``to`` / ``by`` of what they are."""
    return {
        key: tuple(size * to // by if size % 256 == 0 else size for size in shape)
        for key, shape in facts(family)["shapes"].items()
    }
