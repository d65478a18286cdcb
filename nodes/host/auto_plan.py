"""Plans of Parallel Config's auto: from the graph before the ranks start, and again when a sampler runs."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import comfy.model_management
import torch

from ...backend.client import pool
from ...backend.client.auto import measurements, planning
from ...backend.client.auto.model_choice import ModelChoice
from ...backend.client.auto.open_patches import with_patches
from ...backend.client.auto.planning import Asked, EstimateOf
from ...backend.config import ConfigError, ParallelConfig
from ...backend.parallel.stage_split import TEXT_TOKENS
from ...backend.planner import patches
from ...backend.planner.auto_config import AutoConfig
from ...backend.planner.choose import Question
from ...backend.planner.machine import RequestEstimate, Sides, sides_of
from ...backend.planner.model_shape import ModelShape
from ...backend.protocol import BackendError, RefusedError
from ...backend.runtime.callbacks import nothing
from .guidance import skips_negative
from .handle import ParallelDiT, lora_bytes, with_own, with_plan
from .progress import NodeStatus
from .rank_weights import dynamic_weights, host_room
from .request_estimate import request_estimate

measurements.HELD.append(dynamic_weights)
#: How many plans are tried where ranks run out of memory.
ATTEMPTS = 3
#: Said after a sampler's plan where the loader's was another one, whose text stays on the page.
REPLANNED = " Load Parallel DiT shows the plan before."
#: Handles of the samplings of Parallel Model under way, the innermost last.
_under_way: list[ParallelDiT] = []
Ran = TypeVar("Ran")


def plan_under_node(asked: Asked) -> tuple[ParallelConfig, tuple[str, ...]]:
    """Choose ranks as planning.plan_for does; show what it waits for under the node, and take Cancel."""
    _make_room(asked.auto)
    with NodeStatus() as status:
        check = partial(status.check, "cancelling")
        config, lines = planning.plan_for(asked, check, status.show)
    for line in lines:
        logging.info("parallel-dit: %s", line)
    return config, lines


def run_planned(asked: Asked, run: Callable[[ParallelConfig, tuple[str, ...]], Ran]) -> Ran:
    """Return ``run`` with the plan that ``plan_under_node`` chooses and its lines. Where ranks run out of
    memory, it runs again with a plan that is to need less. Errors are those of both."""
    failure: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            plan, lines = plan_under_node(asked)
        except ConfigError:  # nothing needs less
            forgot = planning.spare_no_more(asked.auto, asked.model)
            if failure is not None:
                break
            if not forgot:
                raise
            continue  # this request needs more than the one that ran out did
        try:
            return run(plan, lines)
        except (BackendError, RefusedError) as error:
            if not (planning.is_memory_shortage(error) and planning.spare_more(asked, plan)):
                raise
            failure = error
            logging.warning("parallel-dit: %s\nparallel-dit: auto tries a plan that needs less", error)
    assert failure is not None  # the loop has run
    raise failure


def question_for_page(
    auto: AutoConfig, model: ModelChoice, request: EstimateOf, check: Callable[[], None]
) -> tuple[Question, list[int]]:
    """Return what the planner is asked for a model, as planning.question_of does. For the page: no node runs,
    and Cancel belongs to a graph; what ``check`` raises ends it."""
    _make_room(auto, check)
    return planning.question_of(Asked(auto, model, request), check)


def _make_room(auto: AutoConfig, check: Callable[[], None] = nothing):
    """Have room for the processes that measure GPUs, which are ranks too. Ranks that run have the memory that
    those would take, and end where these GPUs were not measured yet, as by degrees of one's own. ``check``
    raises where a graph has begun meanwhile, whose ranks and models those are."""
    if auto.base.resolve_device(torch.cuda.device_count()) != "cuda":
        return
    planning.note_shared(_own_gpu())
    devices = planning.devices_of(auto)
    if pool.launched() is not None:
        # one GPU is not measured: there is nothing to choose
        if len(devices) == 1 or measurements.is_measured("cuda", devices):
            return
        check()
        pool.close_idle(0)
    check()
    host_room().make_for_start(devices)


def _own_gpu() -> int | None:
    """Return the GPU on which ComfyUI computes, as its text encoder and VAE; None for another device."""
    device = comfy.model_management.get_torch_device()
    return (device.index or 0) if device.type == "cuda" else None


def sample_planned(
    dit: ParallelDiT,
    steps: int,
    cfg: float,
    sampler_name: str,
    positive: list,
    latent: dict,
    sample: Callable[[ParallelDiT], Ran],
) -> Ran:
    """Return ``sample`` with the handle as a sampler with these inputs should use it: itself, with the number
    of patches that it leaves open, or loaded under another plan where its degrees are left to auto. Errors as
    in ``run_planned`` and ``handle.load``."""
    is_warm_up = steps <= dit.config.warmup_steps  # which cuts no patches, as the run's report says
    if dit.auto is None and (is_warm_up or not patches.are_open(dit.config)):
        return sample(dit)
    prompts = 1 if skips_negative(cfg, sampler_name) else 2

    def request(shape: ModelShape) -> RequestEstimate:
        """Read the inputs where model and machine are known: else ranks are the first to judge them."""
        samples = latent["samples"]
        size = (samples.unbind()[0] if samples.is_nested else samples).shape
        prompt, values = positive[0]
        return _request_of(dit, size, _in_context(values), prompt.shape[1], steps, prompts)(shape)

    if dit.auto is None:
        config, lines = with_patches(dit.config, dit.choice, request)
        return sample(replace(dit, config=config, lines=lines))

    def run(config: ParallelConfig, lines: tuple[str, ...]) -> Ran:
        is_as_shown = config.degrees == dit.config.degrees and config.same_weights(dit.config)
        if lines and not is_as_shown:
            lines = (lines[0] + REPLANNED, *lines[1:])
        return sample(with_plan(dit, config, lines))

    return run_planned(Asked(dit.auto, dit.choice, request, dit.others), run)


@contextmanager
def one_plan(dit: ParallelDiT, guider, shape: torch.Size, steps: int) -> Iterator[ParallelDiT]:
    """Give the handle as one sampling of Parallel Model should use it, for all of its calls: loaded under
    another plan where its degrees are left to auto. A sampling within another one, whose calls go on, keeps
    the ranks as they are. ``guider``: ComfyUI's, with prompts. ``shape``: of the latent, the first of
    several. Where ranks run out of memory, the next sampling takes a plan that needs less: this one's solver
    has begun. Errors as in ``sample_planned``."""
    text = _text_tokens(guider.conds)
    references = _references(guider.conds)
    prompts = 2 if _goes_together(guider) else 1
    size = _size_of_calls(shape, guider)
    request = _request_of(dit, size, references, text, steps, prompts, drained=True)
    asked = None if dit.auto is None else Asked(dit.auto, dit.choice, request, dit.others)
    if asked is None or _under_way:
        planned = as_running(dit)
    else:
        planned = run_planned(asked, partial(with_plan, dit))
    _under_way.append(planned)
    try:
        yield planned
    except (BackendError, RefusedError) as error:
        if asked is not None and planning.is_memory_shortage(error):
            planning.spare_more(asked, planned.config)
        raise
    finally:
        _under_way.pop()


def as_running(dit: ParallelDiT) -> ParallelDiT:
    """Return the handle under the plan that the ranks have, where its degrees are left to auto."""
    running = pool.launched()
    if dit.auto is None or running is None:
        return dit
    return replace(dit, config=with_own(dit, running.config))


def _goes_together(guider) -> bool:
    """Return whether ComfyUI hands a positive and a negative prompt to the model in one call
    (calc_cond_batch), which ranks can divide: one of each, with as many tokens, and with the same next to
    them. Others are called one after the other."""
    branches = [guider.conds.get(name) or [] for name in ("positive", "negative")]
    if getattr(guider, "cfg", 1.0) == 1.0 or any(len(branch) != 1 for branch in branches):
        return False
    positive, negative = (branch[0] for branch in branches)
    texts = [each.get("cross_attn") for each in (positive, negative)]
    if positive.keys() != negative.keys() or any(text is None for text in texts):
        return False
    return texts[0].shape == texts[1].shape


def _text_tokens(conds: dict[str, list[dict]]) -> int:
    """Return the tokens of a guider's longest prompt; as many as the loader assumes where none has any."""
    prompts = (each.get("cross_attn") for branch in conds.values() for each in branch)
    return max((each.shape[1] for each in prompts if each is not None), default=TEXT_TOKENS)


def _size_of_calls(shape: torch.Size, guider) -> torch.Size:
    """Return the largest size with which a guider calls the model for a latent of ``shape``: where ComfyUI's
    context windows cut it, that of one window, the frame before it and all frames of guides (LTX-Video),
    which may be in any window."""
    handler = guider.model_options.get("context_handler")
    length = getattr(handler, "context_length", None)
    dim = getattr(handler, "dim", None)
    if length is None or dim is None or dim >= len(shape):
        return shape
    length += bool(getattr(handler, "causal_window_fix", False))
    prompts = [each for branch in guider.conds.values() for each in branch]
    guides = [each.get("guide_attention_entries") or () for each in prompts]
    # a prompt's guides have latent frames after those of the video
    length += max((sum(guide["latent_shape"][0] for guide in each) for each in guides), default=0)
    return torch.Size(min(side, length) if axis == dim else side for axis, side in enumerate(shape))


def _references(conds: dict[str, list[dict]]) -> tuple[torch.Tensor, ...]:
    """Return the latents in context of a guider's prompt with most of them."""
    return max((_in_context(each) for branch in conds.values() for each in branch), key=len, default=())


def _in_context(values: dict) -> tuple[torch.Tensor, ...]:
    """Return the latents whose tokens the model is given after the latent's, of a prompt's values."""
    listed = [*(values.get("reference_latents") or ()), *(values.get("context_latents") or ())]
    later = values.get("time_dim_concat")
    return (*listed, *([] if later is None else [later]))


def _request_of(
    dit: ParallelDiT,
    size: torch.Size,
    references: Sequence[torch.Tensor],
    text: int,
    steps: int,
    prompts: int,
    drained: bool = False,
) -> EstimateOf:
    """Return what makes the request for latents of a ``size`` (B, C, [T,] H, W), the first of several, and
    reference latents next to them."""
    batch, sides = _sides(size, dit)

    def request(shape: ModelShape) -> RequestEstimate:
        own, others = lora_bytes(dit)
        about = RequestEstimate(
            text_tokens=text,
            steps=max(1, steps),
            prompts=prompts,
            batch=batch,
            drained=drained,
            loras=own,
            other_loras=others,
        )
        given = [sides_of(each.shape[1:]) for each in references]
        return request_estimate(shape, sides, given, about)

    return request


def _sides(size: torch.Size, dit: ParallelDiT) -> tuple[int, Sides]:
    """Return the batch and (T, H, W) of latents of this size as the model will get them."""
    format = dit.patcher.model.latent_format
    ratio = getattr(format, "spacial_downscale_ratio", 8)
    # ComfyUI scales an empty latent of another model
    scale = 1 if size[1] == format.latent_channels else ratio // 8 or 1
    frames, height, width = sides_of(size[1:])
    return size[0], (frames, height // scale, width // scale)
