"""The memory that a computation allocates, counted by its tensors: on any device, without its allocator."""

import gc
import weakref
from collections.abc import Callable, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def survivors_of(tensors: Mapping[str, torch.Tensor]) -> Callable[[], list[str]]:
    """Return what names those of ``tensors`` whose memory somebody holds, once the caller no longer does."""
    storages = {name: weakref.ref(tensor.untyped_storage()) for name, tensor in tensors.items()}

    def survivors() -> list[str]:
        gc.collect()
        return [name for name, storage in storages.items() if storage() is not None]

    return survivors


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all storages that operators make; ``peak``: the most that lived at once.

    What one operator allocates and frees inside is not seen.
    """

    def __init__(self):
        super().__init__()
        self.peak = self.now = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):  # what was there before
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage())
        out = func(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage):
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int):
        self.now -= size
