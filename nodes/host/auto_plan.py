"""Plans of Parallel Config's auto: from the graph before the ranks start, and again when a sampler runs."""

import logging
from collections.abc import Callable
from dataclasses import replace

import comfy.model_management
import torch

from ...backend.client import measurements, pool
from ...backend.client.pool import Wanted
from ...backend.config import ParallelConfig
from ...backend.planner.auto_config import AutoConfig
from ...backend.planner.choose import Question, choose
from ...backend.planner.machine import Request
from ...backend.planner.model_shape import ModelShape
from .graph import tokens_of
from .guidance import skips_negative
from .handle import ParallelDiT, with_plan
from .progress import NodeStatus

#: GPUs -> free bytes of each before our ranks took theirs.
_memory: dict[tuple, tuple[int, ...]] = {}


def plan_for(
    auto: AutoConfig, model: Wanted, request: Callable[[ModelShape], Request], others: tuple[Wanted, ...] = ()
) -> tuple[ParallelConfig, tuple[str, ...]]:
    """Choose the ranks of a model and say why, in a line for the choice and one for each runner-up.

    ``others``: models that stay on the same ranks. Raises ConfigError where nothing fits, RefusedError for a
    model that cannot be loaded, BackendError where the machine cannot be measured.
    """
    gpus_here = torch.cuda.device_count()
    devices = auto.devices(gpus_here)
    device = auto.base.resolve_device(gpus_here)
    if len(devices) == 1:
        return auto.placed(auto.base, devices, device), ()
    running = pool.launched()
    asked = {"device": auto.base.device, "compile": auto.base.compile}
    now = replace(running.config, gpus="", **asked) if running else None
    question, devices = question_of(auto, model, request, others)
    choice = choose(question, auto.method, now)
    for line in choice.lines:
        logging.info("parallel-dit: %s", line)
    return auto.placed(choice.plan, devices, device), tuple(choice.lines)


def question_of(
    auto: AutoConfig, model: Wanted, request: Callable[[ModelShape], Request], others: tuple[Wanted, ...] = ()
) -> tuple[Question, list[int]]:
    """Return what the planner is asked for a model, with what was measured of this machine, and the devices
    in the order of its ranks. Errors as in ``plan_for``."""
    gpus_here = torch.cuda.device_count()
    devices = auto.devices(gpus_here)
    device = auto.base.resolve_device(gpus_here)
    with NodeStatus() as status:

        def check():
            if status.interrupted("cancelling"):
                comfy.model_management.throw_exception_if_processing_interrupted()

        shapes = [measurements.model_shape(each, device, check, status.show) for each in (model, *others)]
        machine = measurements.machine_rates(device, devices, check, status.show)
    machine = replace(machine, memory=_free_memory(device, devices)).told(auto.rank_shares)
    if not auto.shares:  # whose order is that of gpus
        order = machine.fastest_first()
        machine = machine.ordered(order)
        devices = [devices[index] for index in order] if order else devices
    asked = (shapes[0], request(shapes[0]), machine, len(devices), auto.base, tuple(shapes[1:]))
    return Question(*asked, auto.rank_shares), devices


def planned(
    dit: ParallelDiT, steps: int, cfg: float, sampler_name: str, positive: list, latent: dict
) -> ParallelDiT:
    """Return the handle as a sampler with these inputs should use it: itself, or loaded under another plan
    where its degrees are left to auto. Errors as in ``plan_for`` and ``handle.load``."""
    if dit.auto is None:
        return dit
    prompts = 1 if skips_negative(cfg, sampler_name) else 2

    def request(shape: ModelShape) -> Request:
        batch, sides = _sides(latent, dit)
        text = positive[0][0].shape[1]
        return Request(tokens_of(sides, shape.patch), text, max(1, steps), prompts, batch)

    config, lines = plan_for(dit.auto, dit.wanted, request, dit.others)
    return with_plan(dit, config, lines)


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


def _free_memory(device: str, devices: list[int]) -> tuple[int, ...]:
    """Return the bytes that our ranks may have on each GPU: what is free, or was before ours ran there."""
    key = (device, *devices)
    if pool.launched() is None:
        _memory[key] = measurements.free_memory(device, devices)
    return _memory.get(key) or measurements.usual_memory(device, devices)
