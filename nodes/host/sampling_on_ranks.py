"""What a sampling with Parallel Model holds on the ranks, and what it leaves there."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import comfy.model_management

from ...backend.client.argument_cache import ArgumentCache
from ...backend.client.pool import Backend
from ...backend.protocol import Loaded
from .handle import ParallelDiT
from .rank_weights import host_room


@dataclass
class OnRanks:
    """A backend, the model there, and the handle under its plan. models: those that a guider samples with,
    which stay where room is made. sizes: of calls for which ComfyUI has made room."""

    backend: Backend
    loaded: Loaded
    dit: ParallelDiT
    models: tuple = ()
    sizes: set[str] = field(default_factory=set)


def release(backend: Backend, caches: Iterable[ArgumentCache]):
    """Have ranks free what a VAE needs next: on its GPU the arguments of ``caches`` too, which next calls
    send. What ranks could not free now is named to them by the next release."""
    caches = list(caches)
    check = comfy.model_management.throw_exception_if_processing_interrupted
    ids = dict.fromkeys(each for cache in caches for each in cache.ids)
    if backend.release(host_room(), check, list(ids)):
        for cache in caches:
            cache.forgotten()
