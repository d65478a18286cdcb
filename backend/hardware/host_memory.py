"""Host memory for weights that wait there, page locked where the system allows it."""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import reason

#: Bytes of a piece of host memory, a power of two, and at multiples of how many bytes a tensor begins in it.
PIECE, ALIGNMENT = 1 << 28, 512


@dataclass
class PageLocked:
    """Page-locked bytes of this process: ``used`` by weights, or ``reusable``: torch's allocator has them for
    the next ones. To lock memory takes longer than to copy weights into it: 33 GiB in 8 s were seen elsewhere
    (ik_llama.cpp, pull request 1517)."""

    used: int = 0
    reusable: int = 0

    def lock(self, size: int) -> Tensor:
        """Return so many page-locked bytes, of the reusable ones if they will do."""
        piece = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.used += size
        self.reusable -= min(size, self.reusable)
        weakref.finalize(piece.untyped_storage(), self._leave, size)
        return piece

    def _leave(self, size: int):
        self.used -= size
        self.reusable += size

    def give_back(self):
        """Return the reusable bytes to the system."""
        if not torch.cuda.is_available():
            return
        if hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()
        else:  # before torch 2.12
            torch._C._host_emptyCache()
        self.reusable = 0


PAGE_LOCKED = PageLocked()


class HostMemory:
    """Host memory for many tensors in few pieces: torch rounds each page-locked one up to a power of two."""

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.pieces: list[Tensor] = []
        self.used: list[int] = []

    def like(self, tensor: Tensor) -> Tensor:
        """Return memory for a tensor's values, with its shape and type, in the first piece with room."""
        rooms = (len(piece) - used for piece, used in zip(self.pieces, self.used))
        index = next((i for i, room in enumerate(rooms) if room >= tensor.nbytes), len(self.pieces))
        if index == len(self.pieces):
            self.pieces.append(self._piece(max(PIECE, 1 << (tensor.nbytes - 1).bit_length())))
            self.used.append(0)
        start = self.used[index]
        flat = self.pieces[index][start : start + tensor.nbytes].view(tensor.dtype)
        self.used[index] += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        strides = torch.empty_like(tensor, device="meta").stride()
        return flat.as_strided(tensor.shape, strides, flat.storage_offset())

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values in this memory, or the tensor itself where it is page locked."""
        return tensor if tensor.is_pinned() else self.like(tensor).copy_(tensor)

    def _piece(self, size: int) -> Tensor:
        """Return a piece, page locked as long as the system allows it: WSL 2 and containers limit that."""
        try:
            return PAGE_LOCKED.lock(size) if self.pinned else torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            if not self.pinned:
                raise
            print(
                f"No {size / 1e6:.0f} MB can be page locked ({reason(error, 100)}): weights that wait there "
                f"come back slower.",
                file=sys.stderr,
            )
            self.pinned = False
            return self._piece(size)


@contextmanager
def on_device(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """Copy a layer's weights to ``device``, and put the host's own back afterwards, without a copy."""
    own: dict[tuple, Tensor] = {}  # by the place of the copy: a parameter's data is another object each time

    def place(tensor: Tensor) -> tuple:
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape

    def copied(tensor: Tensor) -> Tensor:
        host = tensor.data
        copy = host.to(device, non_blocking=True)
        own[place(copy)] = host
        return copy

    layer._apply(copied)
    try:
        yield
    finally:
        layer._apply(lambda tensor: own[place(tensor)])
