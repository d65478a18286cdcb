"""The demo model's world in one import: scenes, prompts, latents and a check of images.

Needs torch and the standard library only, so that it can take the place of text encoders and a VAE
wherever the transformer runs.
"""

from .checking import Check, check_image
from .latents import (
    LATENT_RGB_BIAS,
    LATENT_RGB_FACTORS,
    decode,
    encode,
    from_vae_units,
    pack,
    to_vae_units,
    unpack,
)
from .scenes import (
    BACKGROUNDS,
    COLOURS,
    PLACES,
    RELATIONS,
    SHAPES,
    Item,
    Scene,
    describe,
    draw,
    parse_prompt,
    random_example,
    random_prompts,
    random_scene,
)
from .text import encode_prompt

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "Item",
    "LATENT_RGB_BIAS",
    "LATENT_RGB_FACTORS",
    "PLACES",
    "RELATIONS",
    "SHAPES",
    "Scene",
    "Check",
    "check_image",
    "decode",
    "describe",
    "draw",
    "encode",
    "encode_prompt",
    "from_vae_units",
    "pack",
    "parse_prompt",
    "random_example",
    "random_prompts",
    "random_scene",
    "to_vae_units",
    "unpack",
]
