"""What Load Parallel DiT reports of its ranks: what each would hold and send for one request."""

from ...backend.protocol import Describe, Described
from ..comfy_models.registry import family_named
from .handle import ParallelDiT, describe

#: The request: width and height of an image, or width, height and frames of a video, and text tokens.
IMAGE_SIZE = 1024
VIDEO = (832, 480, 81)
TEXT_TOKENS = 512


def plan(dit: ParallelDiT, prompts: int) -> list[str]:
    """Return a line about the request and the settings of ``dit``, and one for each rank."""
    config, (what, latent) = dit.config, assumed_latent(dit)
    described = describe(
        dit,
        Describe(dit.loaded.model, latent, TEXT_TOKENS, prompts, config.num_pipeline_patch, config.stale_kv),
    )
    return [for_what(dit, prompts, what, described), *described.ranks]


def for_what(dit: ParallelDiT, prompts: int, what: str, described: Described) -> str:
    """Return the line about the request."""
    config = dit.config
    patches = (
        ", 1 patch"
        if config.patches == 1
        else f", {config.patches} patches ({config.stale_kv} stale keys and values)"
    )
    prompt = "one prompt" if prompts == 1 else "two prompts (cfg above 1.0)"
    return (
        f"For {what} ({described.image_rows} tokens), {TEXT_TOKENS} text tokens, "
        f"{prompt}{patches if config.pipefusion_degree > 1 else ''}:"
    )


def assumed_latent(dit: ParallelDiT) -> tuple[str, list[int]]:
    """Return (what is assumed to be sampled, [C, [T,] H, W] of its latent, the first one where there are
    several)."""
    format = dit.patcher.model.latent_format
    family = family_named(dit.loaded)
    ratio = getattr(format, "spacial_downscale_ratio", None)
    ratios = getattr(format, "temporal_downscale_ratio", 4)
    extra = [1] if format.latent_dimensions == 3 else []
    if not extra or family.images:
        side = IMAGE_SIZE // (ratio or 8)
        return f"an image of {IMAGE_SIZE} x {IMAGE_SIZE}" if ratio else f"a latent of {side} x {side}", [
            format.latent_channels,
            *extra,
            side,
            side,
        ]
    width, height, frames = VIDEO
    latent = [1 + (frames - 1) // ratios, height // (ratio or 8), width // (ratio or 8)]
    what = (
        f"{frames} frames of {width} x {height}"
        if ratio
        else f"a latent of {latent[0]} x {latent[1]} x {latent[2]}"
    )
    return what + " without their audio" * bool(family.latents), [
        family.latents[0] if family.latents else format.latent_channels,
        *latent,
    ]
