"""Weights that wait in host memory while others need the device, and come back without a file being read.

Unlike accelerate's hooks, which move a module at each forward, they move once, and only when asked to.
"""

import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..device_memory import host_free

#: Fraction of the free host memory that parked weights take at most; page locked, it cannot be swapped out.
HOST_SHARE = 0.5


def has_room(weight_bytes: int, free: int | None = None) -> bool:
    """Return whether the host has room for as much of each rank of this machine. ``free``: bytes of host
    memory, those of now by default."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return weight_bytes * ranks <= HOST_SHARE * (host_free() if free is None else free)


@torch.inference_mode(False)  # parameters outlive the request that brings them back
def to_host(modules: Iterable[nn.Module], pinned: bool = True):
    """Move parameters and buffers to host memory, page locked (``pinned``) so that they come back at the
    speed of the bus. Tensors stay where they are on the meta device and on the host."""

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device.type in ("meta", "cpu"):
            return tensor
        place = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        return place.copy_(tensor)

    for module in modules:
        module._apply(moved)


@torch.inference_mode(False)
def to_device(modules: Iterable[nn.Module], device: torch.device):
    """Move parameters and buffers to ``device``, but for those on the meta device."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device, non_blocking=tensor.is_pinned())

    for module in modules:
        module._apply(moved)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # before the host's copies go
