"""What Load Parallel DiT reports of its ranks: what each would hold and send for one request."""

import logging

import comfy.model_management
import torch
from comfy.cli_args import args

from ...backend.client.auto.open_patches import with_patches
from ...backend.client.auto.planning import EstimateOf
from ...backend.parallel.stage_split import TEXT_TOKENS
from ...backend.planner.machine import RequestEstimate, sides_of
from ...backend.planner.model_shape import ModelShape
from ...backend.protocol import Describe
from ..comfy_models.registry import family_named
from .graph_requests import IMAGE, VIDEO
from .handle import ParallelDiT, ensure_loaded
from .report import plan_line, quantized_lines, rank_lines
from .request_estimate import request_estimate
from .speed_flags import flag_lines


def request_line(dit: ParallelDiT, prompts: int, of_graph: EstimateOf) -> str:
    """Return a line about the request and what the ranks of ``dit`` take for it; log one for each rank.
    ``of_graph``: the request as the graph tells it, whose steps count, and whether each is a call."""
    what, latent = assumed_latent(dit)
    backend, _ = ensure_loaded(dit)

    def estimate(shape: ModelShape) -> RequestEstimate:
        told = of_graph(shape)
        about = RequestEstimate(
            text_tokens=TEXT_TOKENS, steps=told.steps, prompts=prompts, drained=told.drained
        )
        return request_estimate(shape, sides_of(latent), (), about)

    config, _ = with_patches(dit.config, dit.choice, estimate)
    asked = Describe(
        model=dit.loaded.model,
        latent=latent,
        text_tokens=TEXT_TOKENS,
        prompts=prompts,
        num_pipeline_patch=config.num_pipeline_patch,
        stale_kv=config.stale_kv,
        wire=config.wire,
    )
    described = backend.describe(asked, comfy.model_management.throw_exception_if_processing_interrupted)
    for rank in described.ranks:
        logging.info("parallel-dit: for %s, %s", what, rank["text"])
    return plan_line(config, prompts, what, described)


def loaded_lines(dit: ParallelDiT) -> list[str]:
    """Return what each rank of ``dit`` holds, which kernel computes attention and why, how quantized layers
    multiply, and what ComfyUI's own models run with and the ranks do not."""
    gpus: list[int] = []
    if dit.loaded.info["device"] == "cuda" and not dit.config.address:
        gpus = dit.config.gpu_indices
    memory = [torch.cuda.get_device_properties(index).total_memory for index in gpus]
    info = dit.loaded.info
    attention = info["attention"][dit.config.attention]
    _, weight_dtype, matmul = dit.choice
    chosen = {"attention": dit.config.attention, "weight_dtype": weight_dtype, "matmul": matmul}
    kernels = [attention, *quantized_lines(info["quantized"])]
    return [*rank_lines(info["ranks"], gpus, memory), *kernels, *flag_lines(vars(args), chosen, info)]


def assumed_latent(dit: ParallelDiT) -> tuple[str, list[int]]:
    """Return (what is assumed to be sampled, [C, [T,] H, W] of its first latent)."""
    format = dit.patcher.model.latent_format
    family = family_named(dit.loaded)
    known = hasattr(format, "spacial_downscale_ratio")
    ratio = getattr(format, "spacial_downscale_ratio", 8)
    video = format.latent_dimensions == 3
    if not video or family.images:
        size = IMAGE.width
        side = size // ratio
        what = f"{size} x {size}" if known else f"latent {side} x {side}"
        return what, [format.latent_channels, *([1] if video else []), side, side]
    width, height, frames = VIDEO.width, VIDEO.height, VIDEO.length
    time = 1 + (frames - 1) // getattr(format, "temporal_downscale_ratio", 4)
    sides = [time, height // ratio, width // ratio]
    what = f"{frames} frames of {width} x {height}" if known else f"latent {' x '.join(map(str, sides))}"
    if not family.latents:
        return what, [format.latent_channels, *sides]
    return what + " without their audio", [family.latents[0], *sides]
