"""Latent formats that ComfyUI does not have: the demo model's."""

import comfy.latent_formats

from ...demo import shapes


class Shapes(comfy.latent_formats.Flux):
    """Flux's scaling around latents that are rearranged pixels; previews show the pixels."""

    def __init__(self):
        super().__init__()
        self.latent_rgb_factors = shapes.LATENT_RGB_FACTORS
        self.latent_rgb_factors_bias = shapes.LATENT_RGB_BIAS
        self.taesd_decoder_name = None


#: Loaded.info["latent_format"] -> class.
LATENT_FORMATS = {"shapes": Shapes}
