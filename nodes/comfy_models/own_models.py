"""Models and latent formats that ComfyUI does not have, or not in every version, as it would have them."""

import comfy.latent_formats
import comfy.model_base

from ...demo import shapes
from .generic import GenericConfig, VaeScaling

#: Of each channel of the latents of Qwen-Image 2.1's VAE.
# fmt: off
MEAN = (
     0.5126,  0.7721, -0.0631,  1.3506, -0.7855, -2.1025, -0.3458,  1.3722,
     1.8873, -1.7177,  -0.651,  0.2732,  0.7562, -0.6163, -1.0277,  3.8363,
      2.021,  0.0472,   0.932,  2.0087,  2.4954, -0.1391, -1.4249,  1.8464,
    -0.5236,  1.2826,  3.7046, -1.3035,  2.7286, -1.4518, -1.9036, -1.9955,
    -0.0342, -1.0265, -0.7636,  3.0555,  0.0746, -3.0751, -0.1076,  1.7376,
    -1.0914, -1.9435, -0.2784,  -1.368,  0.4809, -0.4433,  0.3764,  0.5729,
    -2.0595,   1.096,  -1.326, -2.0211, -5.0179,  0.5275,  4.0162,  1.8505,
     0.3026,  1.9373,  1.4937,  0.2632,  0.5547, -1.7121, -0.1562,  0.0304,
)
DEVIATION = (
     3.2001,  3.2936,  3.4321,  3.0091,  3.1061,  4.0379,  4.0705,   3.791,
     3.0785,    3.65,  3.9308,  3.0904,  2.8778,  3.7675,   3.732,  5.0756,
     3.2864,  4.0397,  3.1317,  4.0443,  2.9249,  3.9454,  3.0988,  4.2489,
     3.4896,  3.8513,  3.9323,  3.4719,  3.7498,   4.283,  3.5694,  4.2467,
     3.9037,  3.2947,   5.077,  3.5075,    3.27,  3.4767,  2.8063,  5.1125,
     3.5327,  4.7833,  3.1286,  4.1819,  3.8527,  3.8312,  3.5605,  4.3875,
     3.9624,  4.0168,  3.5643,   4.055,  5.5614,  4.2963,   4.408,  3.4959,
     3.8747,  3.7608,  3.5735,   3.149,  3.7662,  3.6746,  3.4563,  3.8161,
)
# fmt: on


class SanaLatent(comfy.latent_formats.LatentFormat):
    """The scaling of DC-AE f32c32: 32 channels, 1/32 of the image's size."""

    latent_channels = 32
    scale_factor = 0.41407
    spacial_downscale_ratio = 32


class QwenImage21Latent(VaeScaling):
    """The scaling of Qwen-Image 2.1's own VAE, 1/16 of the image's size: a mean and deviation a channel."""

    spacial_downscale_ratio = 16

    def __init__(self):
        super().__init__(len(MEAN), 2, {"latents_mean": MEAN, "latents_std": DEVIATION})


class Shapes(comfy.latent_formats.Flux):
    """Flux's scaling around latents of the demo model: rearranged pixels, which previews show."""

    def __init__(self):
        super().__init__()
        self.latent_rgb_factors = shapes.LATENT_RGB_FACTORS
        self.latent_rgb_factors_bias = shapes.LATENT_RGB_BIAS
        self.taesd_decoder_name = None


#: Loaded.info["latent_format"] -> class.
LATENT_FORMATS = {"shapes": Shapes}


class Sana(GenericConfig):
    """SANA: flow matching with a shift of 3."""

    sampling_settings = {"shift": 3.0}
    latent_format = SanaLatent


class Flux3(GenericConfig):
    """FLUX.3: flow matching with its own constant shift, and the latents of FLUX.2, whose VAE it shares. Its
    prompts are eight layers of Qwen3-VL's hidden states, concatenated."""

    sampling_settings = {"shift": 6.93}

    @staticmethod
    def latent_format():
        """Return ComfyUI's own scaling, which came with FLUX.2."""
        return comfy.latent_formats.Flux2()


class QwenImage21(GenericConfig):
    """Qwen-Image 2.1 as later versions of ComfyUI have it, for those before. Its prompts are the last hidden
    states of Qwen3-VL without those of images, and before which of them each reference stands."""

    sampling_settings = {"multiplier": 1.0, "shift": 0.69}
    latent_format = QwenImage21Latent
    kind = comfy.model_base.ModelType.FLUX
