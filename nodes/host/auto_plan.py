"""Plans of Parallel Config's auto: from the graph before the ranks start, and again when a sampler runs."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import comfy.model_management
import torch

from ...backend.client import measurements, planning, pool
from ...backend.client.planning import RequestOf
from ...backend.client.pool import Wanted
from ...backend.config import ConfigError, ParallelConfig
from ...backend.planner.auto_config import AutoConfig
from ...backend.planner.choose import Question
from ...backend.planner.machine import Request, tokens_of
from ...backend.planner.model_shape import ModelShape
from ...backend.protocol import BackendError, RefusedError
from .guidance import skips_negative
from .handle import ParallelDiT, lora_bytes, with_plan
from .progress import NodeStatus
from .rank_weights import dynamic_weights, host_room

measurements.HELD.append(dynamic_weights)
#: How many plans are tried where ranks run out of memory.
ATTEMPTS = 3
Ran = TypeVar("Ran")


def plan_for(
    auto: AutoConfig, model: Wanted, request: RequestOf, others: tuple[Wanted, ...] = ()
) -> tuple[ParallelConfig, tuple[str, ...]]:
    """Choose the ranks of a model as planning.plan_for does, with what it waits for under the node, and
    Cancel."""
    _make_room(auto)
    with _watched() as watching:
        config, lines = planning.plan_for(auto, model, request, others, *watching)
    for line in lines:
        logging.info("parallel-dit: %s", line)
    return config, lines


def run_planned(
    auto: AutoConfig,
    model: Wanted,
    request: RequestOf,
    others: tuple[Wanted, ...],
    run: Callable[[ParallelConfig, tuple[str, ...]], Ran],
) -> Ran:
    """Return ``run`` with the plan that ``plan_for`` chooses and its lines. Where ranks run out of memory, it
    runs again with a plan that is to need less. Errors as in ``plan_for`` and of ``run``."""
    failure: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            plan, lines = plan_for(auto, model, request, others)
        except ConfigError:  # nothing needs less
            forgot = planning.spare_no_more(auto, model)
            if failure is not None:
                break
            if not forgot:
                raise
            continue  # this request needs more than the one that ran out did
        try:
            return run(plan, lines)
        except (BackendError, RefusedError) as error:
            if not (planning.ran_out(error) and planning.spare_more(auto, model, request, others, plan)):
                raise
            failure = error
            logging.warning("parallel-dit: %s\nparallel-dit: auto tries a plan that needs less", error)
    assert failure is not None  # the loop has run
    raise failure


def question_of(auto: AutoConfig, model: Wanted, request: RequestOf) -> tuple[Question, list[int]]:
    """Return what the planner is asked for a model, as planning.question_of does, with Cancel."""
    _make_room(auto)
    with _watched() as (check, show):
        return planning.question_of(auto, model, request, (), check, show)


def _make_room(auto: AutoConfig):
    """Have room for the processes that measure GPUs, which are ranks too; where ranks run, they did."""
    gpus_here = torch.cuda.device_count()
    if pool.launched() is None and auto.base.resolve_device(gpus_here) == "cuda":
        host_room().make_for_start(auto.devices(gpus_here))


@contextmanager
def _watched() -> Iterator[tuple]:
    """Give ``check`` and ``show`` of planning.plan_for for the node that runs now."""
    with NodeStatus() as status:

        def check():
            if status.interrupted("cancelling"):
                comfy.model_management.throw_exception_if_processing_interrupted()

        yield check, status.show


def sample_planned(
    dit: ParallelDiT,
    steps: int,
    cfg: float,
    sampler_name: str,
    positive: list,
    latent: dict,
    sample: Callable[[ParallelDiT], Ran],
) -> Ran:
    """Return ``sample`` with the handle as a sampler with these inputs should use it: itself, or loaded under
    another plan where its degrees are left to auto. Errors as in ``run_planned`` and ``handle.load``."""
    if dit.auto is None:
        return sample(dit)
    prompts = 1 if skips_negative(cfg, sampler_name) else 2

    def request(shape: ModelShape) -> Request:
        batch, sides = _sides(latent, dit)
        text = positive[0][0].shape[1]
        tokens = tokens_of(sides, shape.patch)
        return Request(tokens, text, max(1, steps), prompts, batch, loras=lora_bytes(dit))

    def run(config: ParallelConfig, lines: tuple[str, ...]) -> Ran:
        return sample(with_plan(dit, config, lines))

    return run_planned(dit.auto, dit.wanted, request, dit.others, run)


def _sides(latent: dict, dit: ParallelDiT) -> tuple[int, tuple[int, int, int]]:
    """Return the batch and (T, H, W) of a LATENT as the model will get it, of the first of several."""
    samples = latent["samples"]
    if samples.is_nested:
        samples = samples.unbind()[0]
    format = dit.patcher.model.latent_format
    ratio = getattr(format, "spacial_downscale_ratio", 8)
    # ComfyUI scales an empty latent of another model
    scale = 1 if samples.shape[1] == format.latent_channels else ratio // 8 or 1
    frames = samples.shape[2] if samples.ndim == 5 else 1
    return samples.shape[0], (frames, samples.shape[-2] // scale, samples.shape[-1] // scale)
