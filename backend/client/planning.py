"""Plans of auto: what the planner chooses for a model and a request on this machine, as it was measured.
Imports neither ComfyUI nor torch.distributed."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..config import ParallelConfig
from ..planner.auto_config import AutoConfig
from ..planner.choose import Question, choose
from ..planner.machine import Request
from ..planner.model_shape import ModelShape
from . import measurements, pool
from .pool import Wanted

#: GPUs -> free bytes of each before our ranks took theirs.
_memory: dict[tuple, tuple[int, ...]] = {}
RequestOf = Callable[[ModelShape], Request]


def plan_for(
    auto: AutoConfig,
    model: Wanted,
    request: RequestOf,
    others: tuple[Wanted, ...] = (),
    check=lambda: None,
    show=lambda line: None,
) -> tuple[ParallelConfig, tuple[str, ...]]:
    """Choose the ranks of a model and say why, in a line for the choice and one for each runner-up.

    ``others``: models that stay on the same ranks. ``check`` is called while something is measured and may
    raise; ``show`` gets a line. Raises ConfigError where nothing fits, RefusedError for a model that cannot
    be loaded, BackendError where the machine cannot be measured.
    """
    gpus_here = torch.cuda.device_count()
    devices = auto.devices(gpus_here)
    device = auto.base.resolve_device(gpus_here)
    if len(devices) == 1:
        return auto.placed(auto.base, devices, device), ()
    running = pool.launched()
    asked = {"device": auto.base.device, "compile": auto.base.compile}
    now = replace(running.config, gpus="", **asked) if running else None
    question, devices = question_of(auto, model, request, others, check, show)
    choice = choose(question, auto.method, now)
    return auto.placed(choice.plan, devices, device), tuple(choice.lines)


def question_of(
    auto: AutoConfig,
    model: Wanted,
    request: RequestOf,
    others: tuple[Wanted, ...] = (),
    check=lambda: None,
    show=lambda line: None,
) -> tuple[Question, list[int]]:
    """Return what the planner is asked for a model, with what was measured of this machine, and the devices
    in the order of its ranks. Arguments and errors as in ``plan_for``."""
    gpus_here = torch.cuda.device_count()
    devices = auto.devices(gpus_here)
    device = auto.base.resolve_device(gpus_here)
    shapes = [measurements.model_shape(each, device, check, show) for each in (model, *others)]
    machine = measurements.machine_rates(device, devices, check, show)
    machine = replace(machine, memory=_free_memory(device, devices)).told(auto.rank_shares)
    if not auto.shares:  # whose order is that of gpus
        order = machine.fastest_first()
        machine = machine.ordered(order)
        devices = [devices[index] for index in order] if order else devices
    asked = (shapes[0], request(shapes[0]), machine, len(devices), auto.base, tuple(shapes[1:]))
    return Question(*asked, auto.rank_shares), devices


def projected(config: ParallelConfig, model: Wanted, request: RequestOf) -> float | None:
    """Estimate how many times as fast as one rank a request runs with ``config``, by what was measured of
    this machine and the model before; None where one of them never was, or the ranks are elsewhere."""
    if config.address:
        return None
    device = config.resolve_device(torch.cuda.device_count())
    indices = config.gpu_indices if device == "cuda" else list(range(config.world_size))
    found = measurements.known(model, device, indices)
    if found is None:
        return None
    shape, machine = found
    machine = replace(machine, memory=measurements.usual_memory(device, indices))
    question = Question(shape, request(shape), machine, len(indices))
    return question.option(ParallelConfig()).seconds / question.option(config).seconds


def _free_memory(device: str, devices: list[int]) -> tuple[int, ...]:
    """Return the bytes that our ranks may have on each GPU: what is free, or was before ours ran there."""
    key = (device, *devices)
    if pool.launched() is None:
        _memory[key] = measurements.free_memory(device, devices)
    return _memory.get(key) or measurements.usual_memory(device, devices)
