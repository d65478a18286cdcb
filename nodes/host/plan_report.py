"""What Load Parallel DiT reports of its ranks: what each would hold and send for the graph's requests."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import comfy.model_management
import torch
from comfy.cli_args import args

from ...backend.client.auto.open_patches import with_patches
from ...backend.parallel.stage_split import TEXT_TOKENS
from ...backend.planner.machine import Sides
from ...backend.protocol import Describe, RefusedError
from ..comfy_models.registry import family_named
from .graph_requests import GraphRequest
from .handle import ParallelDiT, ensure_loaded
from .report import plan_line, quantized_lines, rank_lines
from .speed_flags import flag_lines

#: Said after what the graph does not tell.
ASSUMED = " (assumed)"


def request_lines(dit: ParallelDiT, requests: Sequence[GraphRequest]) -> list[str]:
    """Return a line for each of ``requests`` that differ: what the ranks of ``dit`` take for it. Log one for
    each rank. What ranks of two CFG branches cannot run has none: auto loads again for it."""
    assumed = (_for_branches(each, dit.config.cfg_degree) for each in requests)
    return list(dict.fromkeys(_request_line(dit, each) for each in dict.fromkeys(assumed) if each))


def _for_branches(request: GraphRequest, cfg_degree: int) -> GraphRequest | None:
    """Return a request as ranks with so many CFG branches run it, with prompts for all where its cfg is not
    known; None where they cannot. They divide the samples of a call, as many as there are."""
    if request.drained or request.prompts >= cfg_degree:
        return request
    return replace(request, prompts=cfg_degree) if request.cfg is None else None


def _request_line(dit: ParallelDiT, request: GraphRequest) -> str:
    what = request_text(request, dit)
    config, _ = with_patches(dit.config, dit.choice, request.estimate)
    if request.drained:
        config = replace(config, num_pipeline_patch=1)
    asked = Describe(
        model=dit.loaded.model,
        latent=described_latent(dit, request),
        text_tokens=TEXT_TOKENS,
        prompts=request.prompts,
        num_pipeline_patch=config.num_pipeline_patch,
        stale_kv=config.stale_kv,
        wire=config.wire,
        batch=request.size.batch,
        references=[list(sides) for sides in request.references],
        drained=request.drained,
    )
    backend, _ = ensure_loaded(dit)
    try:
        described = backend.describe(asked, comfy.model_management.throw_exception_if_processing_interrupted)
    except RefusedError as error:  # nodes unknown here may make another latent: the sampler's is judged then
        return f"{what}: {error}"
    for rank in described.ranks:
        logging.info("parallel-dit: for %s, %s", what, rank["text"])
    return plan_line(config, what, described)


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


def pixels_of(dit: ParallelDiT) -> Sides:
    """Return frames, and pixels along each side, of a value of the model's latent, as ComfyUI tells them."""
    format = dit.patcher.model.latent_format
    side = getattr(format, "spacial_downscale_ratio", 8)
    if format.latent_dimensions < 3 or family_named(dit.loaded).images:
        return 1, side, side
    return getattr(format, "temporal_downscale_ratio", 4), side, side


def described_latent(dit: ParallelDiT, request: GraphRequest) -> list[int]:
    """Return [C, [T,] H, W] of the latent of a request; the first of nested ones."""
    format = dit.patcher.model.latent_format
    nested = family_named(dit.loaded).latents
    sides = request.sides if format.latent_dimensions == 3 else request.sides[1:]
    return [nested[0] if nested else format.latent_channels, *sides]


def request_text(request: GraphRequest, dit: ParallelDiT) -> str:
    """Say for which size, steps and guidance the numbers of a request stand, and what of it is assumed."""
    size = request.size
    what = f"{size.width} x {size.height}"
    if not hasattr(dit.patcher.model.latent_format, "spacial_downscale_ratio"):
        frames, *sides = request.sides  # how many pixels these are is not known
        what = f"latent {' x '.join(map(str, request.sides if frames > 1 else sides))}"
    elif size.length > 1:
        what = f"{size.length} frames of {what}"
    if size.batch > 1:
        what = f"{size.batch} times {what}"
    if request.references:
        count = len(request.references)
        what += f" with {count} reference image{'s' * (count > 1)}"
    if family_named(dit.loaded).latents:
        what += " without their audio"
    steps = f"{request.steps} step{'s' * (request.steps > 1)}{' of a call each' * request.drained}"
    told = [(what, request.has_size), (steps, request.has_steps)]
    parts = [text if is_told else text + ASSUMED for text, is_told in told]
    return ", ".join([*parts, _guidance_text(request)])


def _guidance_text(request: GraphRequest) -> str:
    """Name the cfg, with the prompts where it does not tell them: some solvers compute both at any cfg."""
    prompts = "two prompts" if request.prompts == 2 else "one prompt"
    if request.cfg is None:
        return prompts + ASSUMED
    is_usual = (request.prompts == 1) == math.isclose(request.cfg, 1.0)
    return f"cfg {request.cfg}" if is_usual else f"cfg {request.cfg} ({prompts})"


def planned_line(requests: Sequence[GraphRequest], dit: ParallelDiT) -> str:
    """Return the line above auto's plan: for which request it was chosen, and of how many."""
    further = len(requests) - 1
    more = f", and {further} further sampler{'s' * (further > 1)}" if further else ""
    return f"for {request_text(requests[0], dit)}{more}:"
