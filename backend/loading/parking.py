"""Weights that wait in host memory while others need the device, and come back without a file being read.

Unlike accelerate's hooks, which move a module at each forward, they move once, and only when asked to.
"""

import os
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from ..device_memory import host_free
from ..host_memory import PAGE_LOCKED, HostMemory

#: Fraction of the free host memory that parked weights take at most; page locked, it cannot be swapped out.
HOST_SHARE = 0.5


def has_room(weight_bytes: int, kept: int = 0) -> bool:
    """Return whether this machine's host memory has room for so many bytes of its ranks together, of which
    they have ``kept`` page locked."""
    return weight_bytes <= HOST_SHARE * (host_free(swap=False) + kept)


@torch.inference_mode(False)  # parameters outlive the request that brings them back
def to_host(modules: Iterable[nn.Module], pinned: bool = True):
    """Move parameters and buffers to host memory, page locked (``pinned``) so that they come back at the
    speed of the bus. Tensors stay where they are on the meta device and on the host."""

    memory = HostMemory(pinned)

    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type in ("meta", "cpu") else memory.like(tensor).copy_(tensor)

    for module in modules:
        module._apply(moved)


@torch.inference_mode(False)
def to_device(modules: Iterable[nn.Module], device: torch.device, but: Iterable[nn.Module] = ()):
    """Move parameters and buffers to ``device``, ``but`` for those of some modules and those on the meta
    device."""
    stay = {id(tensor) for module in but for tensor in chain(module.parameters(), module.buffers())}

    def moved(tensor: Tensor) -> Tensor:
        here = tensor.is_meta or id(tensor) in stay
        return tensor if here else tensor.to(device, non_blocking=tensor.is_pinned())

    for module in modules:
        module._apply(moved)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # before the host's copies go
    # the other ranks of this machine keep about as many
    kept = PAGE_LOCKED.kept * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not has_room(kept, kept):
        PAGE_LOCKED.give_back()
