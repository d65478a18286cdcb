"""A VAE of ComfyUI's around one of diffusers: batches, tiles, cropping and memory are ComfyUI's own."""

import math
from functools import partial
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.taesd.taesd
import comfy.utils
import torch
import torch.nn.functional as F


class Autoencoder(torch.nn.Module):
    """A VAE of diffusers, called as ComfyUI calls one: images (B, 3, [T,] H, W) in [-1, 1] <-> latents (B,
    C, [T,] H, W) in VAE units."""

    vae: Any  # diffusers' autoencoders share methods, and no class that declares them

    def __init__(self, vae: torch.nn.Module):
        super().__init__()
        self.vae = vae

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the mean of the latent's distribution, where the VAE has one."""
        found = self.vae.encode(pixels)
        return found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latent

    def decode(self, latent: torch.Tensor, **options) -> torch.Tensor:
        """Return the pixels of ``latent``."""
        return self.vae.decode(latent).sample


class PackedAutoencoder(Autoencoder):
    """FLUX.2's: ComfyUI's latents are the model's, 2 x 2 cells in one and normalized by the VAE's running
    statistics."""

    def encode(self, pixels):
        return (F.pixel_unshuffle(super().encode(pixels), 2) - self._mean()) / self._deviation()

    def decode(self, latent, **options):
        return super().decode(F.pixel_shuffle(latent * self._deviation() + self._mean(), 2))

    def _mean(self):
        return self.vae.bn.running_mean.view(1, -1, 1, 1)

    def _deviation(self):
        return torch.sqrt(self.vae.bn.running_var.view(1, -1, 1, 1) + self.vae.config.batch_norm_eps)


class FirstFrameAutoencoder(Autoencoder):
    """A video VAE of which a model of images takes the first frame: latents (B, C, H, W)."""

    def encode(self, pixels):
        return super().encode(pixels[:, :, None])[:, :, 0]

    def decode(self, latent, **options):
        return super().decode(latent[:, :, None])[:, :, 0]


#: Class of diffusers -> how it is called, where not as Autoencoder calls it.
AUTOENCODERS = {"AutoencoderKLFlux2": PackedAutoencoder, "AutoencoderKLQwenImage21": FirstFrameAutoencoder}


def _memory_used(numbers, shape, dtype):
    """Return the bytes of so many ``numbers`` a pixel of ``shape`` (B, C, [T,] H, W)."""
    return numbers * math.prod(shape[2:]) * comfy.model_management.dtype_size(dtype)


class DiffusersVAE(comfy.sd.VAE):
    """ComfyUI's VAE object, with a VAE of diffusers in it."""

    def __init__(self, vae: torch.nn.Module):
        """``vae``: an autoencoder of diffusers, in the precision in which it computes."""
        # a small one, for whatever else this version's object holds
        super().__init__(sd=comfy.taesd.taesd.TAESD().state_dict())
        self.first_stage_model = AUTOENCODERS.get(type(vae).__name__, Autoencoder)(vae)
        self.vae_dtype = vae.dtype
        self.size = None
        self.disable_offload = True  # diffusers' modules run where all of their weights are
        self.patcher = comfy.model_patcher.ModelPatcher(
            self.first_stage_model,
            load_device=self.device,
            offload_device=comfy.model_management.vae_offload_device(),
        )
        self._measure(vae)
        self.model_size()

    def decode_tiled_(self, samples, tile_x=None, tile_y=None, overlap=None):
        """Decode in tiles as ComfyUI does, for any number of channels: the mean of three passes with tiles of
        other shapes. ComfyUI falls back to it, with tiles of 512 pixels, where memory does not suffice."""
        ratio = self.upscale_ratio
        assert isinstance(ratio, int)  # ComfyUI has another method for the tiles of videos
        side = 512 // ratio
        width = tile_x or side
        height = tile_y or side

        def decode(tile):
            return self.first_stage_model.decode(tile.to(self.device, self.vae_dtype)).float()

        def one_pass(width, height):
            return comfy.utils.tiled_scale(
                samples,
                decode,
                width,
                height,
                side // 4 if overlap is None else overlap,
                upscale_amount=ratio,
                out_channels=self.output_channels,
                output_device=self.output_device,
            )

        high = one_pass(width // 2, height * 2)
        wide = one_pass(width * 2, height // 2)
        return self.process_output((high + wide + one_pass(width, height)) / 3.0)

    def _measure(self, vae):
        """Set channels and scales, from what the decoder makes of latents of 2 x 2 cells (and 2 and 3 frames)
        without values."""
        with torch.device("meta"):
            model = type(self.first_stage_model)(type(vae).from_config(vae.config))
        config = vae.config
        packed = 4 if isinstance(model, PackedAutoencoder) else 1
        self.latent_channels = (config.get("latent_channels") or config["z_dim"]) * packed
        is_video = not isinstance(model, FirstFrameAutoencoder) and any(
            isinstance(module, torch.nn.Conv3d) for module in vae.modules()
        )

        def decoded(*frames):
            return model.decode(torch.empty(1, self.latent_channels, *frames, 2, 2, device="meta")).shape

        shape = decoded(*[2] * is_video)
        space = shape[-1] // 2
        self.latent_dim = 3 if is_video else 2
        self.output_channels = shape[1]
        self.pad_channel_value = 1.0 if shape[1] == 4 else None  # opaque
        self.upscale_ratio = self.downscale_ratio = space
        pixels = space * space
        if is_video:
            time = decoded(3)[2] - shape[2]
            missing = 2 * time - shape[2]  # frames that the first latent frame lacks
            self.upscale_ratio = (lambda frames: max(0, frames * time - missing), space, space)
            self.downscale_ratio = (lambda frames: max(0, (frames + missing) // time), space, space)
            self.upscale_index_formula = self.downscale_index_formula = (time, space, space)
            pixels *= time
        # numbers a pixel: ComfyUI's own for the VAEs of Stable Diffusion
        self.memory_used_encode = partial(_memory_used, 1767)
        self.memory_used_decode = partial(_memory_used, 2178 * pixels)
