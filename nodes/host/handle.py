"""The graph's handle of a transformer that lives in a backend.

ComfyUI caches node outputs, so a handle can outlive its backend; a backend can outlive its handles too. Both
are settled whenever a handle is used: a dead backend is launched and loaded again, weights that no handle
names are freed.
"""

import logging
import weakref
from dataclasses import dataclass, replace

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.utils

from ...backend.client.launcher import ClosedError
from ...backend.client.pool import (
    Backend,
    Wanted,
    backend_at_hand,
    backend_for,
    backend_holding,
    folders,
    keeps_weights,
)
from ...backend.client.preflight import check_headers
from ...backend.config import ParallelConfig
from ...backend.planner.auto_config import AutoConfig
from ...backend.protocol import Loaded
from ..comfy_models.registry import weightless_patcher
from .progress import NodeStatus, bytes_of

_handles: "weakref.WeakSet[ParallelDiT]" = weakref.WeakSet()
#: Not empty while ``make_no_room`` runs.
_preparing: list[bool] = []


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
    others: tuple[Wanted, ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def wanted(self) -> Wanted:
        """What the backend holds for it."""
        return self.path, self.weight_dtype, self.matmul


def load(
    config: ParallelConfig, path: str, weight_dtype: str, matmul: str = "auto", **planned
) -> ParallelDiT:
    """Load the transformer at ``path`` in the backend of ``config``, which is launched where there is none.
    ``planned``: auto, others and lines of the handle.

    ConfigError, RefusedError or BackendError, in one sentence, where that cannot be. An interrupt of ComfyUI
    ends the launch or the load, and the backend with it.
    """
    _, loaded = _load(config, (path, weight_dtype, matmul))
    patcher = weightless_patcher(loaded)
    handle = ParallelDiT(config, path, weight_dtype, loaded, patcher, matmul=matmul, **planned)
    unload_with(patcher, handle)
    _handles.add(handle)
    return handle


def check_model(config: ParallelConfig, wanted: Wanted, check=lambda: None):
    """Refuse from its headers a model that the ranks of ``config`` could not load, before they are started or
    others end for them. Ranks that run so already refuse it themselves, at once. Errors as in ``load``."""
    at_hand = backend_at_hand(config)
    if config.address or (at_hand is not None and at_hand.alive()):
        return
    check_headers(config, *wanted, folders(), check)


def with_lora(handle: ParallelDiT, path: str, strength: float) -> ParallelDiT:
    """Return a handle of the same transformer with one more LoRA. Both stay usable; errors as in ``load``."""
    loras = (*handle.loras, (path, strength))
    _, loaded = _load(handle.config, handle.wanted, loras)
    found = replace(handle, loaded=loaded, loras=loras)
    _handles.add(found)
    return found


def with_plan(handle: ParallelDiT, config: ParallelConfig, lines: tuple[str, ...]) -> ParallelDiT:
    """Return a handle of the same transformer, loaded under another plan. Errors as in ``load``."""
    if config == handle.config:
        return replace(handle, lines=lines)
    _, loaded = _load(config, handle.wanted, handle.loras)
    found = replace(handle, config=config, loaded=loaded, lines=lines)
    _handles.add(found)
    return found


def ensure_loaded(handle: ParallelDiT, make_room: bool = True) -> tuple[Backend, Loaded]:
    """Return the live backend of a handle with its transformer loaded, again where it has to be. Errors as in
    ``load``.

    ``make_room``: ComfyUI may unload its models for it, which takes back the patches of one that samples.
    """
    return _load(handle.config, handle.wanted, handle.loras, make_room)


def _load(
    config: ParallelConfig, wanted: Wanted, loras: tuple = (), make_room: bool = True
) -> tuple[Backend, Loaded]:
    try:
        with NodeStatus() as status:
            return _load_or_fail(config, wanted, loras, make_room, status)
    except ClosedError:  # this process ends: the graph does not go on, and there is nothing to report
        raise comfy.model_management.InterruptProcessingException() from None


def _load_or_fail(
    config: ParallelConfig, wanted: Wanted, loras: tuple, make_room: bool, status: NodeStatus
) -> tuple[Backend, Loaded]:

    def check():
        if status.interrupted("cancelling: the ranks end"):
            comfy.model_management.throw_exception_if_processing_interrupted()

    def while_asking():
        status.show("reading the model's headers")
        check()

    check_model(config, wanted, while_asking)
    at_hand = backend_at_hand(config)
    starts = at_hand is None or not at_hand.alive()
    if make_room and starts and not keeps_weights(config) and config.device != "cpu":
        # the ranks are about to need the memory in which ComfyUI keeps text encoders and VAEs
        comfy.model_management.unload_all_models()
        comfy.model_management.soft_empty_cache()
    backend = backend_for(config, check, status.warn, status.show)
    if starts:
        status.show("opening the model")
    # what auto has placed otherwise goes on with whatever plan its next request gets
    keep = {h.wanted for h in _handles if h.auto is not None or h.config.topology() == config.topology()}
    bar = comfy.utils.ProgressBar(1)

    def show(progress):
        bar.update_absolute(progress.step, progress.total)
        status.show(f"reading {bytes_of(progress.step, progress.total)}")

    path, weight_dtype, matmul = wanted
    loaded = backend.load(path, weight_dtype, keep, check, loras, show, matmul)
    if bar.current:  # it was not there yet
        for rank in loaded.info["ranks"]:
            logging.info("parallel-dit: %s", rank["text"])
    return backend, loaded


def unload_with(patcher: comfy.model_patcher.ModelPatcher, handle: ParallelDiT):
    """Let the ranks drop a handle's weights when ComfyUI's memory manager drops ``patcher``: "Unload
    models" was pressed, or its GPU is full."""
    # not the handle, which must not live as long as its patcher's clones
    config = handle.config
    wanted = handle.wanted
    is_auto = handle.auto is not None

    def unload(patcher, unpatch_all: bool):
        backend = backend_at_hand(config) if not is_auto else backend_holding(wanted)
        if unpatch_all and not _preparing and backend is not None and backend.alive():
            backend.unload(*wanted)

    patcher.add_callback(comfy.patcher_extension.CallbacksMP.ON_DETACH, unload)


def make_no_room(executor, *arguments, **options):
    """Around ComfyUI's making a model without weights ready to sample: what it wants room for runs elsewhere,
    so no other transformer leaves the ranks for it, such as the second expert of Wan 2.2."""
    _preparing.append(True)
    try:
        return executor(*arguments, **options)
    finally:
        _preparing.pop()
