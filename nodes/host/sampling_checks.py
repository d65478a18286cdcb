"""Checks of a sampler node's inputs, before anything is sent to the ranks."""

import math

import comfy.latent_formats

from ...backend.protocol import RefusedError
from ..comfy_models.registry import family_named
from .conditioning import check_conditioning
from .guidance import skips_negative

#: Scale and channels of a model's latents -> ComfyUI's node that makes empty ones.
_EMPTY = {
    (16, 64): "EmptyFlux2LatentImage",  # Qwen-Image 2.1
    (16, 128): "EmptyFlux2LatentImage",
    (32, 32): "EmptyHunyuanImageLatent",
    (32, 64): "EmptyHunyuanImageLatent",
}
#: What makes latents of a video with audio.
_LTX2_LATENTS = "for LTX-2, EmptyLTXVLatentVideo and LTXV Empty Latent Audio, joined by Concat AV Latent"
#: Pixels along each side to a latent's, of most models and of empty latents that say nothing of it.
_USUAL_SCALE = 8


def check_inputs(dit, cfg: float, sampler_name: str, positive: list, negative: list, latent: dict) -> list:
    """Check a sampler node's inputs and return the negative prompt to use: the positive one where it is
    skipped. RefusedError or ConfigError for what the ranks cannot sample."""
    if not math.isfinite(cfg):
        raise RefusedError(f"cfg is {cfg}, which is no number; use one from 0 to 100, or 1 for no guidance.")
    skipped = skips_negative(cfg, sampler_name)
    if dit.auto is None:  # which chooses ranks that have work
        dit.config.check_guidance(cfg, not skipped)
    name = dit.loaded.family
    family = family_named(dit.loaded)
    check_conditioning("positive", positive, family_name=name, family=family)
    if skipped:
        negative = positive
    check_conditioning("negative", negative, family_name=name, family=family)
    check_latent(latent, dit.patcher.model.latent_format, family.latents)
    if dit.auto is None:
        dit.config.check_batch(latent["samples"].shape[0])
    return negative


def check_latent(latent: dict, latent_format, nested: tuple[int, ...]):
    """Raise RefusedError for a LATENT of another model. ComfyUI gives an empty one the right channels, and
    latents next to it, by itself. ``nested``: channels of the latents, where the transformer takes
    several."""
    samples = latent["samples"]
    if not samples.shape[0]:
        raise RefusedError("latent_image is a batch of 0 latents; use a batch of at least 1.")
    if samples.is_nested:
        channels = tuple(part.shape[1] for part in samples.unbind())
        if not nested:
            raise RefusedError(
                "latent_image holds several latents (video and audio), but this transformer takes one; use "
                "the empty-latent node of this model, or separate them first."
            )
        if channels != nested:
            raise RefusedError(
                f"latent_image holds latents of {channels} channels, but this transformer takes {nested}; "
                f"make them with this model's own empty-latent node ({_LTX2_LATENTS})."
            )
        return
    if nested and (samples.any() or not _adds_latents(latent_format)):
        raise RefusedError(
            f"latent_image is one latent, but this transformer takes {len(nested)} (video and audio); join "
            f"both ({_LTX2_LATENTS})."
        )
    shapes = {2: (4,), 3: (4, 5)}[latent_format.latent_dimensions]
    wanted = latent_format.latent_channels
    frames = "frames, " if latent_format.latent_dimensions == 3 else ""
    if samples.ndim not in shapes or (samples.shape[1] != wanted and samples.any()):
        video = " is of a video and" if samples.ndim == 5 and not frames else ""
        raise RefusedError(
            f"latent_image{video} has the shape {list(samples.shape)}, but this transformer takes [batch, "
            f"{wanted}, {frames}height, width]; make it with this model's own empty-latent node, or encode "
            f"an image with its VAE."
        )
    scale = getattr(latent_format, "spacial_downscale_ratio", _USUAL_SCALE)
    # channels of ComfyUI's usual empty latents
    of_another_model = samples.shape[1] in (4, 16) and samples.shape[1] != wanted
    if scale != _USUAL_SCALE and of_another_model and "downscale_ratio_spacial" not in latent:
        node = _EMPTY.get((scale, wanted), "the empty-latent node of this model")
        raise RefusedError(
            f"latent_image is an empty latent at 1/8 of the image's size, but this transformer's are at "
            f"1/{scale}, and this ComfyUI does not scale it; make it with {node}."
        )


def _adds_latents(latent_format) -> bool:
    """Return whether ComfyUI gives an empty latent of this format the others, as it does for MiniMax-H3."""
    usual = getattr(comfy.latent_formats.LatentFormat, "fix_empty_latent", None)
    return getattr(type(latent_format), "fix_empty_latent", None) is not usual
