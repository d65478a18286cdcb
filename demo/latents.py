"""Images as Flux-like latents without a VAE: 12 channels of rearranged pixels and 4 of zeros.

"Model space" is what the transformer sees. "VAE units" are what a LATENT holds between nodes:
ComfyUI's Flux latent format turns them into model space by `(z - shift) * scale`.
"""

import torch
import torch.nn.functional as F

CHANNELS = 16
PIXEL_CHANNELS = 12  # 3 colours x 2 x 2 pixels
SCALE = 0.3611
SHIFT = 0.1159
UPSCALE = 4  # 2 pixels per latent cell x 4 = the usual 8 image pixels per latent cell

# Model-space channel 4 * colour + k holds sub-pixel k of a colour; a preview takes their mean.
LATENT_RGB_FACTORS = [
    [0.25 if channel // 4 == colour else 0.0 for colour in range(3)] for channel in range(CHANNELS)
]
LATENT_RGB_BIAS = [0.0, 0.0, 0.0]


def pack(pixels: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) in [-1, 1], H and W even -> model space (B, 16, H/2, W/2)."""
    folded = F.pixel_unshuffle(pixels, 2)
    return F.pad(folded, (0, 0, 0, 0, 0, CHANNELS - PIXEL_CHANNELS))


def unpack(latent: torch.Tensor) -> torch.Tensor:
    """Model space (B, 16, h, w) -> pixels (B, 3, 2h, 2w) in about [-1, 1]."""
    return F.pixel_shuffle(latent[:, :PIXEL_CHANNELS], 2)


def to_vae_units(latent: torch.Tensor) -> torch.Tensor:
    """Model space -> VAE units, any shape."""
    return latent / SCALE + SHIFT


def from_vae_units(latent: torch.Tensor) -> torch.Tensor:
    """VAE units -> model space, any shape."""
    return (latent - SHIFT) * SCALE


def decode(latent: torch.Tensor, upscale: int = UPSCALE) -> torch.Tensor:
    """VAE units (B, 16, h, w) -> image (B, 2h * upscale, 2w * upscale, 3) in [0, 1].

    Pixels are repeated rather than blended, so that `encode` is the exact inverse.
    """
    pixels = unpack(from_vae_units(latent))
    pixels = F.interpolate(pixels, scale_factor=upscale, mode="nearest")
    return ((pixels + 1) / 2).clamp(0, 1).movedim(1, -1)


def encode(image: torch.Tensor, upscale: int = UPSCALE) -> torch.Tensor:
    """Image (B, H, W, 3) in [0, 1] -> VAE units (B, 16, H / (2 * upscale), W / (2 * upscale)).

    Rows and columns that do not fill a latent cell are cut off at the bottom and the right.
    """
    cell = 2 * upscale
    height, width = (side // cell * cell for side in image.shape[1:3])
    pixels = F.avg_pool2d(image[:, :height, :width, :3].movedim(-1, 1), upscale)
    return to_vae_units(pack(pixels * 2 - 1))
