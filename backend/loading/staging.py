"""Copies between host and GPU through page-locked memory: weights of a mapped file, noise, and previews.

A copy straight from a mapped file waits for its page faults: it takes 1.2 to 11 times as long as one through
page-locked memory (safetensors issue 729), 17 times on GB300 (NVIDIA cosmos-framework 150). Here the host
reads the next piece of the file while the one before it travels.
"""

import sys
from functools import cache

import torch
from torch import Tensor, nn

from ..errors import reason

#: Bytes of each of the two buffers of a rank: many pages of a file, and little of the host's memory.
PIECE = 32 << 20


class Staging:
    """Two page-locked buffers that take turns; an event of each says when it may be written again."""

    def __init__(self):
        buffers = (torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        self._turns = [(buffer, torch.cuda.Event()) for buffer in buffers]

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a copy of a CPU tensor on ``device``, contiguous, which its current stream may read."""
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        source = tensor.contiguous().view(-1).view(torch.uint8)
        target = out.view(-1).view(torch.uint8)
        for piece, onto in zip(source.split(PIECE), target.split(PIECE)):
            buffer, sent = self._turns[0]
            self._turns.reverse()
            sent.synchronize()  # what it held before has left it
            buffer[: len(piece)].copy_(piece)
            onto.copy_(buffer[: len(piece)], non_blocking=True)
            sent.record()
        return out


@cache
def _staging() -> Staging | None:
    """Return this rank's buffers; None where no memory can be page locked, as in WSL 2 and containers."""
    try:
        return Staging()
    except RuntimeError as error:
        print(f"No memory can be page locked ({reason(error, 100)}): loading is slower.", file=sys.stderr)
        return None


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of a mapped file on ``device``; on the CPU the tensor itself."""
    place = torch.device(device)
    staging = _staging() if place.type == "cuda" else None
    return staging.copy(tensor, place) if staging else tensor.to(place)


def upload_parameters(module: nn.Module, device: torch.device):
    """Move a module's parameters that are on the CPU to ``device``; sharded ones are there."""
    if device.type == "cpu":
        return
    for parameter in module.parameters():
        if parameter.device.type == "cpu":
            parameter.data = upload(parameter.data, device)


def page_locked(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return page-locked host memory, to which a GPU copies while nobody waits; where none can be page
    locked, other memory, for which the host waits."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(shape, dtype=dtype)


def lock_ahead(like: Tensor, copies: int):
    """Lock pages for ``copies`` Downloads at once of tensors ``like`` this, which torch's allocator keeps for
    them: locking may wait for the device."""
    locked = [page_locked(like.shape, like.dtype) for _ in range(copies)]
    del locked


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor on ``device``, for which nobody waits; on the CPU the tensor itself. Each
    copy has page-locked memory of its own, which torch's allocator gives to no other before it has left."""
    if device.type == "cpu":
        return tensor
    staged = page_locked(tensor.shape, tensor.dtype)
    return staged.copy_(tensor).to(device, non_blocking=True)


class Download:
    """A tensor on its way to the host, for which nobody waits: from a GPU into page-locked memory, on its
    current stream; on the CPU a copy."""

    def __init__(self, tensor: Tensor):
        if tensor.device.type == "cpu":
            self._tensor = tensor.clone()
            self._arrived = None
            return
        self._tensor = page_locked(tensor.shape, tensor.dtype)
        self._tensor.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def arrived(self) -> Tensor | None:
        """Return the host's tensor, or None where it is still on its way."""
        return self._tensor if self._arrived is None or self._arrived.query() else None
