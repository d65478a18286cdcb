"""The graph's handle of a transformer that lives in a backend.

ComfyUI caches node outputs, so a handle can outlive its backend; a backend can outlive its handles too. Both
are settled whenever a handle is used: a dead backend is launched and loaded again. Weights that no handle
names stay, for a graph that alternates with this one: where memory is short, models that the running graph
does not name are parked, or freed where the host has no room, and come back when they are next used. They go
for good with the last handle where ComfyUI has unloaded all models (its Free model and node cache).
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import comfy.model_management
import comfy.model_patcher
import comfy.utils

from ...backend.client.argument_cache import ArgumentCache
from ...backend.client.auto import measurements
from ...backend.client.auto.model_choice import ModelChoice
from ...backend.client.auto.preflight import check_headers
from ...backend.client.launching.launcher import ClosedError
from ...backend.client.pool import Backend, backend_at_hand, backend_for, folders, launched
from ...backend.config import ParallelConfig
from ...backend.planner.auto_config import AutoConfig
from ...backend.protocol import Loaded
from ...backend.quantization.lora_bytes import LoraBytes
from ...backend.units import progress_text
from ..comfy_models.registry import weightless_patcher
from .models_on_ranks import free_orphans, make_way, register, run_evicting_models
from .progress import NodeStatus
from .rank_weights import host_room

_handles: "weakref.WeakSet[ParallelDiT]" = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class ParallelDiT:
    """A PARALLEL_DIT: where a transformer is loaded, ComfyUI's weightless ``patcher`` for it, and the LoRAs
    that are added, (path, strength) each. ``auto``: what chose ``config``, for one request, and chooses again
    for another; None where the degrees are set. ``others``: models that stay on the same ranks. ``lines``:
    why this plan."""

    config: ParallelConfig
    choice: ModelChoice
    loaded: Loaded
    patcher: comfy.model_patcher.ModelPatcher
    loras: tuple[tuple[str, float], ...] = ()
    auto: AutoConfig | None = None
    others: tuple[ModelChoice, ...] = ()
    lines: tuple[str, ...] = ()


def load(config: ParallelConfig, choice: ModelChoice, **planned) -> ParallelDiT:
    """Load a transformer in the backend of ``config``, which is launched where there is none. ``planned``:
    auto, others and lines of the handle. ConfigError, RefusedError or BackendError, in one sentence, where
    that cannot be. An interrupt of ComfyUI ends the launch or the load, and the backend with it."""
    _, loaded = _load(config, choice)
    return _track(ParallelDiT(config, choice, loaded, weightless_patcher(loaded), **planned))


def _track(handle: ParallelDiT) -> ParallelDiT:
    """Return a handle, from now on one for which weights stay loaded."""
    _handles.add(handle)
    weakref.finalize(handle, _free_orphans).atexit = False
    return handle


def is_named(choice: ModelChoice) -> bool:
    """Return whether a handle has this model."""
    return any(handle.choice == choice for handle in _handles)


def _free_orphans():
    free_orphans({handle.choice for handle in _handles})


@dataclass
class OnRanks:
    """What a sampling of Parallel Model holds: a backend, the model there, and the handle under its plan.
    models: those that a guider samples with, which stay where room is made. sizes: of calls for which ComfyUI
    has made room."""

    backend: Backend
    loaded: Loaded
    dit: ParallelDiT
    models: tuple = ()
    sizes: set[str] = field(default_factory=set)


def release(backend: Backend, caches: list[ArgumentCache]):
    """Have ranks free what a VAE needs next: on its GPU the arguments of ``caches`` too, which next calls
    send. What ranks could not free now is named to them by the next release."""
    check = comfy.model_management.throw_exception_if_processing_interrupted
    ids = dict.fromkeys(each for cache in caches for each in cache.ids)
    if backend.release(host_room(), check, list(ids)):
        for cache in caches:
            cache.forgotten()


def lora_bytes(handle: ParallelDiT) -> tuple[LoraBytes, LoraBytes]:
    """Return what LoRAs take next to quantized weights: those of ``handle``, and of models on its ranks."""

    def of(dit: ParallelDiT) -> LoraBytes:
        return LoraBytes(*dit.loaded.info["lora_bytes"])

    each = ([of(h) for h in _handles if h.choice == name] for name in handle.others)
    return of(handle), LoraBytes.of_all(max(found, key=sum) for found in each if found)


def check_model(config: ParallelConfig, choice: ModelChoice, check: Callable[[], None]):
    """Refuse from its headers a model that the ranks of ``config`` could not load, before they are started or
    others end for them. Ranks that run so already refuse it themselves, at once. Errors as in ``load``."""
    at_hand = backend_at_hand(config)
    if config.address or (at_hand is not None and at_hand.alive()):
        return
    check_headers(config, choice, folders(), check)


def with_lora(handle: ParallelDiT, path: str, strength: float) -> ParallelDiT:
    """Return a handle with one more LoRA, and log what is said of it. Both stay usable; errors as in
    ``load``."""
    loras = (*handle.loras, (path, strength))
    config = _present_plan(handle)
    _, loaded = _load(config, handle.choice, loras)
    if warning := loaded.info["warnings"][-1]:
        logging.warning("parallel-dit: %s", warning)
    return _track(replace(handle, config=config, loaded=loaded, loras=loras))


def _present_plan(handle: ParallelDiT) -> ParallelConfig:
    """Return the plan under which ranks hold the transformer now, where a sampler has changed auto's."""
    running = launched()
    if handle.auto is None or running is None or handle.choice not in running.models:
        return handle.config
    return with_own(handle, running.config)


def with_own(handle: ParallelDiT, config: ParallelConfig) -> ParallelConfig:
    """Return the ranks' plan with what a plan does not change of a handle's."""
    own = handle.config
    return replace(config, attention=own.attention, compile=own.compile, wire=own.wire)


def with_plan(handle: ParallelDiT, config: ParallelConfig, lines: tuple[str, ...]) -> ParallelDiT:
    """Return a handle of the same transformer, loaded under another plan. Errors as in ``load``."""
    if config == handle.config:
        return replace(handle, lines=lines)
    _, loaded = _load(config, handle.choice, handle.loras)
    return _track(replace(handle, config=config, loaded=loaded, lines=lines))


def ensure_loaded(handle: ParallelDiT, make_room: bool = True) -> tuple[Backend, Loaded]:
    """Return the live backend of a handle with its transformer loaded, again where it has to be.
    ``make_room``: ComfyUI may unload its models for it, which takes back the patches of one that samples.
    Errors as in ``load``."""
    return _load(handle.config, handle.choice, handle.loras, make_room)


def _load(
    config: ParallelConfig, choice: ModelChoice, loras: tuple = (), may_make_room: bool = True
) -> tuple[Backend, Loaded]:
    try:
        with NodeStatus() as status:
            return _load_with_status(config, choice, loras, may_make_room, status)
    except ClosedError:  # this process ends: the graph does not go on, and there is nothing to report
        raise comfy.model_management.InterruptProcessingException() from None


def _load_with_status(
    config: ParallelConfig, choice: ModelChoice, loras: tuple, may_make_room: bool, status: NodeStatus
) -> tuple[Backend, Loaded]:
    check_start = partial(status.check, "cancelling: the ranks end")

    def while_asking():
        status.show("reading the model's headers")
        check_start()

    check_model(config, choice, while_asking)
    at_hand = backend_at_hand(config)
    starts = at_hand is None or not at_hand.alive()

    def make_room_for_start():
        if may_make_room and config.device != "cpu":
            host_room().make_for_start(config.gpu_indices)

    backend = backend_for(config, check_start, status.warn, status.show, make_room_for_start)
    check = partial(status.check, "cancelling: the ranks end", backend)
    if starts:
        status.show("opening the model")
    if may_make_room:  # not before each call of a model: it would walk through the folders
        # what auto has placed otherwise goes on with whatever plan its next request gets
        topology = config.topology()
        stay = {h.choice for h in _handles if h.auto is not None or h.config.topology() == topology}
        make_way(backend, choice, stay, check)
    bar = comfy.utils.ProgressBar(1)

    def show(progress):
        bar.update_absolute(progress.step, progress.total)
        status.show(f"reading {progress_text(progress.step, progress.total)}")

    load_once = partial(backend.load, *choice, loras=loras, check=check, on_progress=show)
    loaded = run_evicting_models(backend, choice, load_once, check, may_make_room)
    named = {(handle.config.topology(), handle.choice) for handle in _handles}
    register(config.topology(), choice, backend, loaded, named, is_named)
    if not config.address and loaded.info["device"] == "cuda":  # on the CPU a file is mapped, not read
        measurements.note_load_rate(choice, "cuda", loaded.info["ranks"])
    if bar.current:  # it was not there yet
        for rank in loaded.info["ranks"]:
            logging.info("parallel-dit: %s", rank["text"])
    return backend, loaded
