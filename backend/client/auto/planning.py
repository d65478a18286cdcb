"""Plans of auto: what the planner chooses for a model and a request on this machine, as it was measured."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from ...config import ConfigError, ParallelConfig
from ...errors import RAN_OUT
from ...hardware.device_memory import HOST_SHARE, host_free
from ...hardware.gpu_kernels import has_kernels
from ...planner.auto_config import AutoConfig
from ...planner.choose import MEMORY, PlanChoice, Question, choose
from ...planner.machine import RequestEstimate
from ...planner.model_shape import ModelShape
from ...planner.placement import Ranks
from ...planner.weight_swaps import FILE_RATE, WeightSwaps
from ...quantization.dequantized_cache import have_ranks_run_out, may_cache_dequantized
from ...runtime.callbacks import nothing
from ...units import coarse_gigabytes
from .. import pool
from . import measurements
from .model_choice import ModelChoice
from .plan_history import LastPlan, PlanHistory

#: Of this process, whose requests share its ranks.
_history = PlanHistory()
#: Part of a rank's memory that the next plan leaves free beyond what the one that ran out did.
SPARED = 0.02
#: nvidia-smi takes up to a second: while ranks run it is asked this often at most.
LOOK_SECONDS = 60.0
EstimateOf = Callable[[ModelShape], RequestEstimate]
Ran = TypeVar("Ran")
#: Tokens of a small latent: of 256 x 256 pixels in most families.
SMALL = 256


class Asked(NamedTuple):
    """A request of a model for which auto plans; ``others``: models that stay on the same ranks."""

    auto: AutoConfig
    model: ModelChoice
    request: EstimateOf
    others: tuple[ModelChoice, ...] = ()

    @property
    def models(self) -> tuple[ModelChoice, ...]:
        return (self.model, *self.others)


def plan_for(asked: Asked, check=nothing, show=nothing) -> tuple[ParallelConfig, tuple[str, ...]]:
    """Choose the ranks of a model and say why, in a line for the choice and one for each runner-up. ``check``
    is called while something is measured and may raise; ``show`` gets a line. Raises ConfigError where
    nothing fits, RefusedError for a model that cannot be loaded, BackendError where the machine cannot be
    measured."""
    auto = asked.auto
    devices = devices_of(auto)
    if len(devices) == 1:
        return auto.placed(auto.base, devices), tuple(filter(None, [_why_alone(auto, devices)]))
    question, devices = question_of(asked, check, show)
    ranks = _ranks(asked, question, devices)
    try:
        choice = choose(question, auto.method, ranks)
    except ConfigError:  # the fastest GPUs may have less memory than others
        question, roomiest = question_of(asked, check, show, roomiest=True)
        if roomiest == devices:
            raise
        devices = roomiest
        ranks = _ranks(asked, question, devices)
        choice = choose(question, auto.method, ranks)
    _note_plan(asked, question.request, choice, ranks)
    first, *further = choice.lines
    spared = _why_spared(asked, choice.option.unit)
    return placed(auto, choice.plan, question, devices), (first + spared, *further)


def placed(auto: AutoConfig, plan: ParallelConfig, question: Question, devices: list[int]) -> ParallelConfig:
    """Return ``plan`` on the GPUs that it is for. ``question``, ``devices``: as ``question_of`` has them."""
    return auto.placed(plan, [devices[index] for index in question.machine.gpus_of_ranks(plan.world_size)])


def devices_of(auto: AutoConfig) -> list[int]:
    """Return the GPUs, or the ranks of the CPU, that ``auto`` may use on this machine: where it lists none,
    those that torch has kernels for, if any. ConfigError as AutoConfig.devices."""
    gpus_here = torch.cuda.device_count()
    devices = auto.devices(gpus_here)
    if auto.gpus.strip() or auto.shares.strip() or auto.base.resolve_device(gpus_here) == "cpu":
        return devices
    return [index for index in devices if has_kernels(index)] or devices


def _why_alone(auto: AutoConfig, devices: list[int]) -> str:
    """Say why one GPU is used where there are others; empty where that was asked for, or is all there is."""
    if auto.gpus.strip() or auto.base.resolve_device(torch.cuda.device_count()) == "cpu":
        return ""
    if torch.cuda.device_count() > 1:
        return f"one GPU ({devices[0]}): torch has no kernels for the others of this machine."
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    # ComfyUI's --default-device lists 32, which hides none
    if not hidden or len(hidden.split(",")) > torch.cuda.device_count():
        return ""
    return (
        f"one GPU: CUDA_VISIBLE_DEVICES is {hidden!r:.100}, which hides others from ComfyUI, if there are "
        f"any; what starts it sets that, or its option --cuda-device."
    )


def _ranks(asked: Asked, question: Question, devices: list[int]) -> Ranks | None:
    """Return the ranks that may go on under a plan of auto; None where others start."""
    auto = asked.auto
    running = pool.launched()
    if running is None or running.config.world_size > len(devices):
        return None
    now = replace(running.config, gpus="", device=auto.base.device, compile=auto.base.compile)
    if not running.can_become(placed(auto, now, question, devices)):
        return None
    last = _history.last
    if last is None or last.auto != auto or not _as_planned(now):
        return Ranks(now)  # somebody wants it otherwise now, whatever that takes
    shapes = zip(asked.models, (question.shape, *question.others))
    held = tuple(shape for each, shape in shapes if each in running.models)
    rate = question.swaps.file or FILE_RATE
    rate = math.inf if question.machine.on_host else rate  # a host maps files
    return Ranks(plan=now, held=held, regret=last.regret, rate=rate)


def _as_planned(config: ParallelConfig) -> bool:
    """Return whether weights lie on the ranks of ``config`` as the last plan has placed them."""
    last = _history.last
    return last is not None and replace(config, gpus="", device=last.plan.device).same_weights(last.plan)


def takes_turns(model: ModelChoice, config: ParallelConfig) -> bool:
    """Return whether the plan of the ranks of ``config`` counts on ``model`` without the graph's others."""
    last = _history.last
    return last is not None and model in last.turns and _as_planned(config)


def _note_plan(asked: Asked, request: RequestEstimate, choice: PlanChoice, ranks: Ranks | None):
    """Keep what the choice for the next request needs. One for a whole graph counts when it runs."""
    _history.tokens = request.image_tokens * request.batch
    regret = choice.regret
    if request.then is not None:
        regret = dict(ranks.regret) if ranks and ranks.plan.same_weights(choice.plan) else {}
    turns = asked.models if choice.option.swap_seconds else ()
    _history.last = LastPlan(asked.auto, choice.plan, regret, turns)


def or_leanest(auto: AutoConfig, estimate: EstimateOf, run: Callable[[AutoConfig, EstimateOf], Ran]) -> Ran:
    """Return ``run`` with a plan for an estimated request; where nothing fits that, with the plan that needs
    least for a small latent: samplers plan again for the latent that they are given. Raises the ConfigError
    of the estimate where the model does not fit so either."""
    try:
        return run(auto, estimate)
    except ConfigError as error:
        too_large = error

    def small(shape: ModelShape) -> RequestEstimate:
        return replace(estimate(shape), image_tokens=SMALL, reference_tokens=0, batch=1)

    try:
        return run(replace(auto, method=MEMORY), small)
    except ConfigError:
        raise too_large from None


def is_memory_shortage(error: BaseException) -> bool:
    """Return whether ranks lacked memory for a load or a request, or ran out of it."""
    return bool(getattr(error, "lacking", {})) or RAN_OUT in str(error)


def spare_more(asked: Asked, plan: ParallelConfig) -> bool:
    """Have the next plans of a model leave more memory free than ``plan``, whose ranks ran out of it. One
    under which models take turns may run again first: once ranks have run out, others leave for all that is
    likely needed, and no weights stay dequantized. False where one rank is all. Errors as in ``plan_for``."""
    auto = asked.auto
    if len(devices_of(auto)) == 1:
        return False
    # others may have taken what was free: less is known to be, then, and no plan has to spare it besides
    _history.looked.pop(_memory_key(auto), None)
    question, devices = question_of(asked)
    if placed(auto, plan, question, devices).gpus != plan.gpus:
        question, _ = question_of(asked, roomiest=True)
    together, alone = (each.option(plan) for each in (question, replace(question, others=())))
    option = together if together.fits else alone  # models that take turns
    key = _spared_key(auto, asked.model)
    if option is alone and key not in _history.spared and have_ranks_run_out():
        _history.spared[key] = 0
    elif option.fits:  # else what is free now is less than it was, and rules the plan out
        left = option.room - option.bytes
        _history.spared[key] = _history.spared.get(key, 0) + left + math.ceil(SPARED * option.room)
    return True


def spare_no_more(auto: AutoConfig, model: ModelChoice) -> bool:
    """Plan as if ranks had never run out of memory, where no plan spares as much; return whether they had."""
    return _history.spared.pop(_spared_key(auto, model), 0) > 0


def _memory_key(auto: AutoConfig) -> tuple:
    return (auto.base.resolve_device(torch.cuda.device_count()), *devices_of(auto))


def _spared_key(auto: AutoConfig, model: ModelChoice) -> tuple:
    return (*_memory_key(auto), model)


def note_shared(gpu: int | None):
    """Have plans use a GPU on which ComfyUI computes, if any, after others that are alike."""
    _history.shared = gpu


def note_left(gpu: int, size: int):
    """Have the next plans count that ComfyUI needs room on a GPU between requests of this size: it has just
    taken weights from ranks there, of which at most ``size`` bytes could have stayed. Not where the ranks run
    as no plan of auto placed them."""
    running = pool.launched()
    if running is None or not _as_planned(running.config):
        return
    key = (gpu, _history.tokens)
    _history.left[key] = min(_history.left.get(key, size), size)


def _why_spared(asked: Asked, unit: str) -> str:
    """Return a sentence for after a choice where memory is spared (``unit``: as in Option), else nothing."""
    size = _history.spared.get(_spared_key(asked.auto, asked.model), 0)
    if not size:
        return ""
    stays = f" About {coarse_gigabytes(size)} per {unit} stay free until a restart"
    return f"{stays}, since ranks ran out of memory with a plan that left less."


def question_of(
    asked: Asked, check=nothing, show=nothing, roomiest: bool = False
) -> tuple[Question, list[int]]:
    """Return what the planner is asked for a model, with what was measured here, and the devices in the order
    in which plans take them (ranks: ``placed``): the fastest first, or the ``roomiest``. Arguments and errors
    as in ``plan_for``."""
    auto = asked.auto
    devices = devices_of(auto)
    device = auto.base.resolve_device(torch.cuda.device_count())
    shapes = tuple(measurements.model_shape(each, device, devices, check, show) for each in asked.models)
    machine = measurements.machine_rates(device, devices, check, show)
    spared = _history.spared.get(_spared_key(auto, asked.model), 0) * (len(devices) if machine.on_host else 1)
    memory = tuple(max(0, free - spared) for free in _free_memory(device, devices))
    machine = replace(machine, memory=memory)
    if not auto.shares:  # whose order is that of gpus
        shared = None if "," in auto.gpus else _history.shared
        first = machine.roomiest_first if roomiest else machine.fastest_first
        order = first(devices.index(shared) if shared in devices else None)
        machine = machine.ordered(order, usual=first())
        devices = [devices[index] for index in order] if order else devices
    request = asked.request(shapes[0])
    host = int(HOST_SHARE * _host_memory())
    file = measurements.load_rate(asked.model, device)
    left = _history.left_after(devices, request.image_tokens * request.batch) if device == "cuda" else ()
    swaps = WeightSwaps(host, file, left, measurements.unified_among(device, devices))
    of_first = ()
    if machine.differs:
        of_first = measurements.shapes_of_first(asked.models, device, devices, shapes, check, show)
    question = Question(
        shape=shapes[0],
        request=request,
        machine=machine,
        gpus=len(devices),
        base=auto.base,
        others=shapes[1:],
        shares=auto.rank_shares,
        swaps=swaps,
        caches_dequantized=may_cache_dequantized(),
        shapes=of_first,
    )
    return question, devices


def projected(config: ParallelConfig, model: ModelChoice, request: EstimateOf) -> float | None:
    """Estimate how many times as fast as one rank a request runs with ``config``; None as known_question."""
    question = known_question(config, model, request)
    if question is None:
        return None
    return question.option(ParallelConfig()).seconds / question.option(config).seconds


def known_question(config: ParallelConfig, model: ModelChoice, request: EstimateOf) -> Question | None:
    """Return what the planner is asked for a request on the ranks of ``config``, by what was measured of this
    machine and the model before; None where one of them never was, or the ranks are elsewhere."""
    if config.address:
        return None
    device = config.resolve_device(torch.cuda.device_count())
    indices = config.gpu_indices if device == "cuda" else list(range(config.world_size))
    known = measurements.known(model, device, indices)
    if known is None:
        return None
    shape, machine = known[0], replace(known[1], memory=measurements.usual_memory(device, indices))
    return Question(
        shape=shape,
        request=request(shape),
        machine=machine,
        gpus=len(indices),
        caches_dequantized=may_cache_dequantized(),
    )


def _free_memory(device: str, devices: list[int]) -> tuple[int, ...]:
    """Return the bytes that our ranks may have on each GPU: what is free, or was before ours ran there."""
    key = (device, *devices)
    running = pool.launched()
    if running is None:
        _history.free[key] = measurements.free_memory(device, devices)
        return _history.free[key]
    known = _history.free.get(key) or measurements.usual_memory(device, devices)
    now = time.monotonic()
    if device == "cuda" and now > _history.looked.get(key, -math.inf) + LOOK_SECONDS:
        _history.looked[key] = now
        known = _history.free[key] = measurements.free_now(known, devices, running)
    return known


def _host_memory() -> int:
    """Return the bytes of host memory that are free, or were before our ranks parked weights there."""
    key = ("host memory",)
    if pool.launched() is None or key not in _history.free:
        _history.free[key] = (host_free(swap=False),)
    return _history.free[key][0]
