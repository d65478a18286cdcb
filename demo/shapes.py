"""The demo model's world in one import: scenes, prompts, latents and a check of images.

Needs torch and the standard library only, so that it can take the place of text encoders and a VAE
wherever the transformer runs.
"""

from .checking import Check, check_image
from .latents import LATENT_RGB_BIAS, LATENT_RGB_FACTORS, decode, encode, to_vae_units
from .scenes import draw, parse_prompt, random_prompts
from .text import encode_prompt

__all__ = ["Check", "check_image", "draw", "encode_prompt", "parse_prompt", "random_prompts"]
__all__ += ["LATENT_RGB_BIAS", "LATENT_RGB_FACTORS", "decode", "encode", "to_vae_units"]
