"""The graph's handle of a transformer that lives in a backend.

ComfyUI caches node outputs, so a handle can outlive its backend; a backend can outlive its handles too. Both
are settled whenever a handle is used: a dead backend is launched and loaded again, weights that no handle
names are freed. That is at the next load, or with the last handle where ComfyUI has unloaded all models (its
Free model and node cache). A handle can outlive its model, too: where memory is short, models that the
running graph does not name make room, and are loaded again when they are next used.
"""

import logging
import os
import weakref
from collections.abc import Callable, Collection
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TypeVar

import comfy.model_management
import comfy.model_patcher
import comfy.utils

from ...backend.client import measurements, planning
from ...backend.client.launcher import ClosedError
from ...backend.client.model_choice import ModelChoice
from ...backend.client.pool import Backend, backend_at_hand, backend_for, folders, launched
from ...backend.client.preflight import check_headers
from ...backend.config import ParallelConfig
from ...backend.dequantized_cache import have_ranks_run_out
from ...backend.planner.auto_config import AutoConfig
from ...backend.protocol import BackendError, Loaded, RefusedError
from ...backend.units import progress_text
from ..comfy_models.registry import weightless_patcher
from .graph_requests import loaded_models, unnamed
from .progress import NodeStatus
from .queued_graph import running
from .rank_weights import RankWeights, entries, host_room, may_hold_memory

Ran = TypeVar("Ran")

_handles: "weakref.WeakSet[ParallelDiT]" = weakref.WeakSet()
#: (topology, ModelChoice) of a handle -> its backend, and what ComfyUI's memory manager knows of it.
_weights: dict[tuple, tuple[Backend, list[RankWeights]]] = {}


@dataclass(frozen=True, eq=False)
class ParallelDiT:
    """A PARALLEL_DIT: where a transformer is loaded, ComfyUI's weightless ``patcher`` for it, and the LoRAs
    that are added, (path, strength) each.

    ``auto``: what chose ``config``, for one request, and chooses again for another; None where the degrees
    are set. ``others``: models that stay on the same ranks. ``lines``: why this plan.
    """

    config: ParallelConfig
    path: str
    weight_dtype: str
    loaded: Loaded
    patcher: comfy.model_patcher.ModelPatcher
    loras: tuple[tuple[str, float], ...] = ()
    matmul: str = "auto"
    auto: AutoConfig | None = None
    others: tuple[ModelChoice, ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def choice(self) -> ModelChoice:
        """What the backend holds for it."""
        return ModelChoice(self.path, self.weight_dtype, self.matmul)


def load(
    config: ParallelConfig, path: str, weight_dtype: str, matmul: str = "auto", **planned
) -> ParallelDiT:
    """Load the transformer at ``path`` in the backend of ``config``, which is launched where there is none.
    ``planned``: auto, others and lines of the handle.

    ConfigError, RefusedError or BackendError, in one sentence, where that cannot be. An interrupt of ComfyUI
    ends the launch or the load, and the backend with it.
    """
    _, loaded = _load(config, ModelChoice(path, weight_dtype, matmul))
    patcher = weightless_patcher(loaded)
    return _track(ParallelDiT(config, path, weight_dtype, loaded, patcher, matmul=matmul, **planned))


def _track(handle: ParallelDiT) -> ParallelDiT:
    """Return a handle, from now on one that weights are kept for."""
    _handles.add(handle)
    weakref.finalize(handle, _free_orphans).atexit = False
    return handle


def _free_orphans():
    """Free what ranks have parked of weights that no handle names, where ComfyUI has unloaded all models.
    What has left to make room waits for the next load, which may want it under another plan."""
    named = {handle.choice for handle in _handles}
    for (_, choice), (backend, found) in list(_weights.items()):
        unloaded = any(entry.all_go for entry in found) and not any(entry.held for entry in found)
        if unloaded and choice not in named:
            _unload(backend, choice, park=False)


def lora_bytes(handle: ParallelDiT) -> tuple[int, int]:
    """Return the bytes that LoRAs take next to quantized weights: those of ``handle``, and those of the
    models that stay on its ranks."""

    def of(found: ParallelDiT) -> int:
        return found.loaded.info["lora_bytes"]

    others = (max((of(h) for h in _handles if h.choice == name), default=0) for name in handle.others)
    return of(handle), sum(others)


def check_model(config: ParallelConfig, choice: ModelChoice, check: Callable[[], None]):
    """Refuse from its headers a model that the ranks of ``config`` could not load, before they are started or
    others end for them. Ranks that run so already refuse it themselves, at once. Errors as in ``load``."""
    at_hand = backend_at_hand(config)
    if config.address or (at_hand is not None and at_hand.alive()):
        return
    check_headers(config, *choice, folders(), check)


def with_lora(handle: ParallelDiT, path: str, strength: float) -> ParallelDiT:
    """Return a handle of the same transformer with one more LoRA, and log what is said of it. Both stay
    usable; errors as in ``load``."""
    loras = (*handle.loras, (path, strength))
    config = _at_hand(handle)
    _, loaded = _load(config, handle.choice, loras)
    if warning := loaded.info["warnings"][-1]:
        logging.warning("parallel-dit: %s", warning)
    return _track(replace(handle, config=config, loaded=loaded, loras=loras))


def _at_hand(handle: ParallelDiT) -> ParallelConfig:
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
    """Return the live backend of a handle with its transformer loaded, again where it has to be. Errors as in
    ``load``.

    ``make_room``: ComfyUI may unload its models for it, which takes back the patches of one that samples.
    """
    return _load(handle.config, handle.choice, handle.loras, make_room)


def _load(
    config: ParallelConfig, choice: ModelChoice, loras: tuple = (), make_room: bool = True
) -> tuple[Backend, Loaded]:
    try:
        with NodeStatus() as status:
            return _load_with_status(config, choice, loras, make_room, status)
    except ClosedError:  # this process ends: the graph does not go on, and there is nothing to report
        raise comfy.model_management.InterruptProcessingException() from None


def _load_with_status(
    config: ParallelConfig, choice: ModelChoice, loras: tuple, make_room: bool, status: NodeStatus
) -> tuple[Backend, Loaded]:
    check = partial(status.check, "cancelling: the ranks end")

    def while_asking():
        status.show("reading the model's headers")
        check()

    check_model(config, choice, while_asking)
    at_hand = backend_at_hand(config)
    starts = at_hand is None or not at_hand.alive()
    room = host_room() if make_room else None
    if room and starts and not (planning.keeps_weights(config) or config.device == "cpu" or config.address):
        room.make_for_start(config.gpu_indices)
    backend = backend_for(config, check, status.warn, status.show)
    if starts:
        status.show("opening the model")
    # what auto has placed otherwise goes on with whatever plan its next request gets
    keep = {h.choice for h in _handles if h.auto is not None or h.config.topology() == config.topology()}
    # of those of the graph ComfyUI's cache may have dropped the handles; a model in its calls keeps all,
    # without a walk through the folders
    keep |= loaded_models(running()) if make_room else set(backend.models)
    bar = comfy.utils.ProgressBar(1)

    def show(progress):
        bar.update_absolute(progress.step, progress.total)
        status.show(f"reading {progress_text(progress.step, progress.total)}")

    room = room and room.keeping(entries_to_keep(backend, choice))
    load = partial(backend.load, *choice, keep=keep, loras=loras, check=check, on_progress=show, room=room)
    loaded = run_evicting_models(backend, choice, lambda all_ranks: load(all_ranks=all_ranks), make_room)
    _register(config, choice, backend, loaded)
    if not config.address and loaded.info["device"] == "cuda":  # on the CPU a file is mapped, not read
        measurements.remember_load(choice, "cuda", loaded.info["ranks"])
    if bar.current:  # it was not there yet
        for rank in loaded.info["ranks"]:
            logging.info("parallel-dit: %s", rank["text"])
    return backend, loaded


def run_evicting_models(backend: Backend, choice: ModelChoice, run: Callable[[bool], Ran], looks=True) -> Ran:
    """Run a load or a request of ``choice``. Where ranks lack memory for it, models leave, the least recently
    used one first, and it runs again: those that the running graph does not load, since ComfyUI's cache keeps
    their handles alive; then its others, such as the first of two experts, which are parked. ``run`` gets
    whether every rank is to have what it likely needs: where it ``looks``, while models are there that the
    graph does not load, or any that leave for that. RefusedError where that is not enough."""
    left: set[ModelChoice] = set()
    while True:
        others = [each for each in backend.models if each not in (choice, *left)]
        idle = [each for each in others if may_hold_memory(_entries(backend, {each}))]
        unneeded = unnamed(idle, running()) if looks else None
        all_ranks = unneeded is not None or (looks and bool(idle) and _others_leave(backend, choice))
        try:
            return run(all_ranks)
        except RefusedError as error:
            unneeded = unneeded or unnamed(idle, running())
            if not error.lacking or not idle:
                raise
            leaves = unneeded or idle[0]
            parks = unneeded is None
            check = comfy.model_management.throw_exception_if_processing_interrupted
            if not _unload(backend, leaves, park=parks, waits=parks, check=check) and not all_ranks:
                raise
        left.add(leaves)
        names = [os.path.basename(each.path) for each in (leaves, choice)]
        why = "the graph does not load it" if unneeded else "both do not fit and take turns"
        logging.info("parallel-dit: %s leaves the ranks for %s, since %s", *names, why)


def _others_leave(backend: Backend, choice: ModelChoice) -> bool:
    """Return whether the others of a graph leave for what one likely needs: auto's plan counts on that, or
    ranks have run out of memory before. Else they leave for what it needs at least."""
    return have_ranks_run_out() or planning.takes_turns(choice, backend.config)


def _unload(
    backend: Backend,
    choice: ModelChoice,
    park=True,
    ranks: Collection[int] = (),
    waits=False,
    check=lambda: None,
) -> list[int]:
    """Take weights off the devices of ranks as Backend.unload does, and tell ComfyUI's memory manager which
    devices no longer hold them. Return these ranks: all where the backend has ended, of which a line in the
    log says why."""
    left = list(range(backend.welcome.world_size))
    try:
        left = backend.unload(choice, park, ranks, waits, check) if backend.alive() else left
    except ClosedError:  # by ourselves
        pass
    except BackendError as error:
        logging.warning("parallel-dit: %s", error)
    finally:  # an interrupt is raised once they have left
        for entry in _entries(backend, {choice}):
            entry.held = entry.held and not set(entry.ranks) <= set(left)
    return left


def _entries(backend: Backend, models: Collection[ModelChoice]) -> list[RankWeights]:
    """Return what ComfyUI's memory manager knows of these models on a backend."""
    here = [found for (_, key), (holder, found) in _weights.items() if holder is backend and key in models]
    return list(chain(*here))


def _register(config: ParallelConfig, choice: ModelChoice, backend: Backend, loaded: Loaded):
    """Tell ComfyUI's memory manager which devices now hold the weights, and drop entries of models that have
    left, of those that neither these ranks nor a handle know, and of these weights under another topology:
    through such an entry the manager would take the weights that are about to be used."""
    names = {(handle.config.topology(), handle.choice) for handle in _handles}
    name = (config.topology(), choice)
    for other, (holder, _) in list(_weights.items()):
        if holder is backend:  # these ranks may hold a model without a handle
            stays = other[1] in backend.models and other[1] != choice
        else:
            stays = other in names
        if other != name and not stays:
            del _weights[other]

    def free(ranks: tuple[int, ...]) -> bool:
        return bool(_unload(backend, choice, ranks=ranks))

    if name not in _weights or _weights[name][0] is not backend:
        _weights[name] = (backend, entries(loaded, backend.welcome, free))
    for entry in _weights[name][1]:
        entry.register()


def free_weights(check=lambda: None) -> int:
    """Free the weights of every model on this machine's ranks, also those that ComfyUI's Unload Models has
    left in host memory, where no request and no sampling runs; return of how many. ``check`` may raise."""
    every = [(choice, each, found) for (_, choice), (each, found) in list(_weights.items())]
    busy = {id(each) for _, each, found in every if any(entry.holders for entry in found) or each.is_busy}
    here = [
        (choice, each) for choice, each, found in every if found and each.alive() and id(each) not in busy
    ]
    return sum(bool(_unload(backend, choice, park=False, check=check)) for choice, backend in here)


def entries_to_keep(
    backend: Backend, choice: ModelChoice, used: Collection = ()
) -> list[comfy.model_management.LoadedModel]:
    """Return the entries of ComfyUI's list that stay where a load or a request of ``choice`` likely has too
    little memory: weights on these ranks of all models of the running graph, such as the other one of two
    experts, which leave only where it has too little to run at all (run_evicting_models), unless they leave
    for what is likely; and the models ``used`` by a sampling of ComfyUI's, whose patches must stay."""
    others = () if _others_leave(backend, choice) else loaded_models(running())
    own = _entries(backend, {choice, *others})
    return [
        entry
        for entry in comfy.model_management.current_loaded_models
        if entry.model in own or any(entry.model is each for each in used)
    ]


@contextmanager
def rank_weights_stay():
    """Keep every transformer on the ranks while ComfyUI makes room."""
    held = [entry for _, found in _weights.values() for entry in found if entry.held]
    for entry in held:
        entry.holders += 1
    try:
        yield
    finally:
        for entry in held:
            entry.holders -= 1
            if entry.held:
                entry.register()


def keep_rank_weights(executor, *arguments, **options):
    """Wrap ComfyUI's PREPARE_SAMPLING so that no transformer leaves the ranks for a weightless model."""
    with rank_weights_stay():
        return executor(*arguments, **options)
