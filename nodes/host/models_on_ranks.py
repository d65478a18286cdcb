"""Models on the ranks, as this ComfyUI counts them: entries in the list of its memory manager, and which of
them leave where a load or a request lacks memory."""

import logging
import os
from collections.abc import Callable, Collection
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import TypeVar

import comfy.model_management
from comfy_execution.utils import get_executing_context

from ...backend.client.auto import planning
from ...backend.client.auto.model_choice import ModelChoice
from ...backend.client.interrupts import CancelledError, cancel
from ...backend.client.launching.launcher import ClosedError
from ...backend.client.pool import Backend
from ...backend.hardware.device_memory import HOST_SHARE, host_free
from ...backend.protocol import BackendError, Loaded, RefusedError
from ...backend.quantization.dequantized_cache import have_ranks_run_out
from ...backend.runtime.callbacks import nothing
from ..graph.queued_graph import running
from .graph_requests import loaded_models, unnamed
from .progress import NodeStatus
from .rank_weights import RankWeights, entries, host_room, may_hold_memory

Ran = TypeVar("Ran")

#: (topology, ModelChoice) of a handle -> its backend, and what ComfyUI's memory manager knows of it.
_weights: dict[tuple, tuple[Backend, list[RankWeights]]] = {}


def run_evicting_models(
    backend: Backend,
    choice: ModelChoice,
    run: Callable[..., Ran],
    check: Callable[[], None],
    looks=True,
    used: Collection = (),
) -> Ran:
    """Run a load or a request of ``choice``. Where ranks lack memory for it, models leave, the least recently
    used one first, and it runs again: those that the running graph does not load, but the next one may; then
    its others, such as the first of two experts. They are parked where the host has room. Where it ``looks``
    for memory, ``run`` gets as ``room`` what ComfyUI can make, without the models ``used`` by a sampling, and
    as ``all_ranks`` whether every rank is to have what it likely needs: while models are there that the graph
    does not load, or any that leave for that. ``check`` may interrupt a wait for others. RefusedError where
    that is not enough."""
    room = host_room().keeping(entries_to_keep(backend, choice, used)) if looks else None
    gone_models: set[ModelChoice] = set()
    backend.aside.discard(choice)  # it comes back by itself
    while True:
        others = [each for each in backend.models if each not in (choice, *gone_models)]
        present = [each for each in others if each not in backend.aside]
        holding = [each for each in present if may_hold_memory(_entries(backend, {each}))]
        unneeded = unnamed(holding, running()) if looks else None
        all_ranks = unneeded is not None or (looks and bool(holding) and _others_leave(backend, choice))
        try:
            return run(room=room, all_ranks=all_ranks)
        except RefusedError as error:
            # another client may have brought parked models back, which we cannot see; for what is likely
            # alone they are not asked to leave
            if backend.process is None:
                holding = holding or [each for each in others if each in backend.aside]
            unneeded = unneeded or unnamed(holding, running())
            if not error.lacking or not holding:
                raise
            leaving = unneeded or holding[0]
            left_ranks = unload(backend, leaving, waits=True, check=check)
            if not left_ranks and not all_ranks:
                raise
        gone_models.add(leaving)
        if len(left_ranks) == backend.welcome.world_size:  # where ComfyUI has no entries, only this says so
            backend.aside.add(leaving)
        names = [os.path.basename(each.path) for each in (leaving, choice)]
        why = "the graph does not load it" if unneeded else "both do not fit and take turns"
        logging.info("parallel-dit: %s leaves the ranks for %s, since %s", *names, why)


def _others_leave(backend: Backend, choice: ModelChoice) -> bool:
    """Return whether the others of a graph leave for what one likely needs: auto's plan counts on that, or
    ranks have run out of memory before. Else they leave for what it needs at least."""
    return have_ranks_run_out() or planning.takes_turns(choice, backend.config)


def unload(
    backend: Backend, choice: ModelChoice, park=True, ranks: Collection[int] = (), waits=False, check=nothing
) -> list[int]:
    """Take weights off the devices of ranks as Backend.unload does, and tell ComfyUI's memory manager which
    devices no longer hold them, nor those of models that were freed for it. Return these ranks: all where the
    backend has ended, of which a line in the log says why."""
    left = list(range(backend.welcome.world_size))
    try:
        spare = spare_models(backend) if park else []
        left = backend.unload(choice, park, ranks, waits, check, spare) if backend.alive() else left
    except ClosedError:  # by ourselves
        pass
    except BackendError as error:
        logging.warning("parallel-dit: %s", error)
    except BaseException:
        left = [] if backend.client.withdrawn else left
        raise
    finally:  # an interrupt is raised once they have left
        for entry in _entries(backend, {choice}):
            entry.held = entry.held and not set(entry.ranks) <= set(left)
        for entry in _entries(backend, {key for _, key in _weights} - backend.models.keys()):
            entry.held = False
    return left


def _entries(backend: Backend, models: Collection[ModelChoice]) -> list[RankWeights]:
    """Return what ComfyUI's memory manager knows of these models on a backend."""
    here = [found for (_, key), (holder, found) in _weights.items() if holder is backend and key in models]
    return list(chain(*here))


def register(
    topology: tuple,
    choice: ModelChoice,
    backend: Backend,
    loaded: Loaded,
    named: Collection[tuple],
    is_named: Callable[[ModelChoice], bool],
):
    """Tell ComfyUI's memory manager which devices now hold the weights, and drop entries of models that have
    left, of those that neither these ranks nor a handle know, and of these weights under another topology:
    through such an entry the manager would take the weights that are about to be used. ``named``: (topology,
    ModelChoice) of every handle; ``is_named``: has a model a handle by then? One that has none, and that the
    last graph does not load, goes with all models (Unload Models) for good."""
    name = (topology, choice)
    for other, (holder, _) in list(_weights.items()):
        if holder is backend:  # these ranks may hold a model without a handle
            stays = other[1] in backend.models and other[1] != choice
        else:
            stays = other in named
        if other != name and not stays:
            del _weights[other]

    def free(ranks: tuple[int, ...]) -> bool:
        all_go = any(entry.all_go for entry in _entries(backend, {choice}))
        if backend.is_left and not all_go and get_executing_context() is None:
            return False  # --disable-smart-memory, at the end of the cancelled graph itself
        wait_for_left(backend)
        parks = not all_go or is_named(choice) or choice in loaded_models(running())
        return bool(unload(backend, choice, park=parks, ranks=ranks if parks else ()))

    if name not in _weights or _weights[name][0] is not backend:
        _weights[name] = (backend, entries(loaded, backend.welcome, free))
    for entry in _weights[name][1]:
        entry.settle = partial(wait_for_left, backend)
        entry.register()


def wait_for_left(backend: Backend):
    """Wait for the end of what Cancel has left, where ComfyUI wants memory of its ranks' devices: until then
    neither weights nor what is computed leave. Cancel ends the wait, but raises nothing, as ComfyUI's memory
    manager is in the midst of its list."""
    if not backend.is_left:
        return
    with NodeStatus() as status, suppress(CancelledError):
        backend.settled(partial(cancel, status.interrupted), status.show)


def spare_models(backend: Backend) -> list[ModelChoice]:
    """Return the models of a backend that the running graph does not load, the least recently used first."""
    needed = loaded_models(running())
    return [each for each in backend.models if each not in needed]


def drop_beyond_room(backend: Backend, choice: ModelChoice):
    """Free models that the running graph does not load, the least recently used first, until the others are
    no more than parked weights may be: on CPUs nothing parks. ``choice`` is about to be used."""
    spare = [each for each in spare_models(backend) if each != choice]
    sizes = [sum(entry.size for entry in _entries(backend, {each})) for each in spare]
    room = HOST_SHARE * (host_free(swap=False) + sum(sizes))
    for index, each in enumerate(spare):
        if sum(sizes[index:]) > room:
            unload(backend, each, park=False)


def make_way(backend: Backend, choice: ModelChoice, named: Collection[ModelChoice], check):
    """Have models that the running graph does not load make way before a load of ``choice``, as far as they
    do not stay on ranks of our own until memory lacks (run_evicting_models). Ranks refuse requests of their
    other clients for want of what models hold: those that no handle has ``named`` are parked there."""
    if backend.process is not None:
        if backend.welcome.device == "cpu":
            drop_beyond_room(backend, choice)
        return
    for each in spare_models(backend):
        if each not in (choice, *named, *backend.aside):
            unload(backend, each, waits=True, check=check)
            backend.aside.add(each)


def free_weights(check=nothing) -> int:
    """Free the weights of every model on this machine's ranks, also those that ComfyUI's Unload Models has
    left in host memory, where no request and no sampling runs; return of how many. ``check`` may raise.
    Raises BackendError where ranks end of it, once the others have freed theirs."""
    every = [(choice, backend, found) for (_, choice), (backend, found) in list(_weights.items())]
    busy = {
        id(backend) for _, backend, found in every if backend.is_busy or any(entry.holders for entry in found)
    }
    here = [
        (choice, backend)
        for choice, backend, found in every
        if found and backend.alive() and id(backend) not in busy
    ]
    freed = sum(bool(unload(backend, choice, park=False, check=check)) for choice, backend in here)
    for _, backend in here:
        if backend.why is not None and not isinstance(backend.why, ClosedError):
            raise BackendError(str(backend.why))
    return freed


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


def free_orphans(named: Collection[ModelChoice]):
    """Free what ranks have parked of weights that no handle has ``named``, where ComfyUI has unloaded all
    models. What has left to make room waits for the next load, which may want it under another plan."""
    for (_, choice), (backend, found) in list(_weights.items()):
        unloaded = any(entry.all_go for entry in found) and not any(entry.held for entry in found)
        if unloaded and choice not in named:
            unload(backend, choice, park=False)


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
