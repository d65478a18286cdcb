"""What Load Parallel DiT reports of its ranks: what each would hold and send for one request."""

from ...backend.protocol import Describe, Described
from ..comfy_models.registry import family_named
from .handle import ParallelDiT, ensure_loaded

#: The request: width and height of an image, or width, height and frames of a video, and text tokens.
IMAGE_SIZE = 1024
VIDEO = (832, 480, 81)
TEXT_TOKENS = 512


def plan(dit: ParallelDiT, prompts: int) -> list[str]:
    """Return a line about the request and the settings of ``dit``, and one for each rank."""
    config = dit.config
    what, latent = assumed_latent(dit)
    backend, _ = ensure_loaded(dit)
    settings = (config.num_pipeline_patch, config.stale_kv)
    described = backend.describe(Describe(dit.loaded.model, latent, TEXT_TOKENS, prompts, *settings))
    return [for_what(dit, prompts, what, described), *described.ranks]


def for_what(dit: ParallelDiT, prompts: int, what: str, described: Described) -> str:
    """Return the line about the request."""
    config = dit.config
    patches = ""
    if config.pipefusion_degree > 1 and config.patches == 1:
        patches = ", 1 patch"
    elif config.pipefusion_degree > 1:
        patches = f", {config.patches} patches ({config.stale_kv} stale keys and values)"
    prompt = "one prompt" if prompts == 1 else "two prompts (cfg above 1.0)"
    tokens = f"({described.image_rows} tokens), {TEXT_TOKENS} text tokens"
    return f"For {what} {tokens}, {prompt}{patches}:"


def assumed_latent(dit: ParallelDiT) -> tuple[str, list[int]]:
    """Return (what is assumed to be sampled, [C, [T,] H, W] of its first latent)."""
    format = dit.patcher.model.latent_format
    family = family_named(dit.loaded)
    known = hasattr(format, "spacial_downscale_ratio")
    ratio = getattr(format, "spacial_downscale_ratio", 8)
    video = format.latent_dimensions == 3
    if not video or family.images:
        side = IMAGE_SIZE // ratio
        what = f"an image of {IMAGE_SIZE} x {IMAGE_SIZE}" if known else f"a latent of {side} x {side}"
        return what, [format.latent_channels, *([1] if video else []), side, side]
    width, height, frames = VIDEO
    time = 1 + (frames - 1) // getattr(format, "temporal_downscale_ratio", 4)
    sides = [time, height // ratio, width // ratio]
    what = f"{frames} frames of {width} x {height}" if known else f"a latent of {' x '.join(map(str, sides))}"
    if not family.latents:
        return what, [format.latent_channels, *sides]
    return what + " without their audio", [family.latents[0], *sides]
