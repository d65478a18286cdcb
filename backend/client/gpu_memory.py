"""Memory that is free on GPUs while ranks of ours run there, with what these have themselves."""

from ..config import ConfigError
from ..planner.machine import RESERVE
from ..protocol import BackendError
from . import measurements, status
from .pool import Backend


def free_now(known: tuple[int, ...], devices: list[int], running: Backend) -> tuple[int, ...]:
    """Return the bytes of each of ``devices`` that are free or our ranks'. Others may have taken memory or
    given it back since ``known``, which is the least while a request runs: its memory is not counted yet."""
    try:
        ranks = status.report(running).ranks
        # GPU -> bytes that our rank has there
        held = {
            gpu: max(rank["weight_bytes"], rank["device_bytes"])
            for gpu, rank in zip(running.config.gpu_indices, ranks)
        }
        own = [held.get(gpu, 0) for gpu in devices]
        # last: what counts where the driver says nothing
        now = measurements.free_memory("cuda", devices, [was - size for was, size in zip(known, own)])
    except (BackendError, ConfigError):
        return known
    least = tuple(free + size for free, size in zip(now, own))
    if running.is_busy:
        return tuple(map(max, known, least))
    # of the CUDA context and libraries of a rank no allocator knows: plans leave RESERVE for them
    most = (size + (RESERVE if gpu in held else 0) for gpu, size in zip(devices, least))
    # what was known, unless it lies outside of what can be now
    return tuple(max(low, min(was, high)) for was, low, high in zip(known, least, most))
