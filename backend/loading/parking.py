"""Weights that wait in host memory while others need the device, and come back without a file being read.

Unlike accelerate's hooks, which move a module at each forward, they move once, and only when asked to.
Quantized weights never change: their copy on the host stays while they are on the device, and is not made
again.
"""

import os
from collections.abc import Collection, Iterable
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..hardware.device_memory import HOST_SHARE, host_free
from ..hardware.host_memory import PAGE_LOCKED, HostMemory
from ..quantization.packed_weight import PackedWeight, quantized
from ..units import coarse_gigabytes


def has_room(weight_bytes: int, page_locked: int = 0) -> bool:
    """Return whether this machine's host memory has room for so many bytes of its ranks together;
    ``page_locked``: bytes of them that are so already, and are used again."""
    return weight_bytes <= HOST_SHARE * (host_free(swap=False) + page_locked)


def may_page_lock(modules: Iterable[nn.Module]) -> bool:
    """Return whether this machine has room to page-lock the modules' weights, of which each of its ranks has
    as many. What is page locked can neither be swapped out nor be taken by ComfyUI."""
    size = sum(each.nbytes for module in modules for each in module.parameters() if not _is_page_locked(each))
    if has_room(size * _ranks_here(), PAGE_LOCKED.reusable * _ranks_here()):
        return True
    each = f"{coarse_gigabytes(size)} of each of {_ranks_here()} ranks"
    print(f"Modulation weights ({each}) are not page locked, for want of host memory: they come back slower.")
    return False


class StoredCopies:
    """Page-locked copies of what quantized weights store, while these are on a device."""

    def __init__(self):
        self._copies: WeakKeyDictionary[PackedWeight, list[Tensor]] = WeakKeyDictionary()

    @property
    def bytes(self) -> int:
        """Host memory that they take."""
        return sum(copy.nbytes for copies in self._copies.values() for copy in copies)

    def keep(self, modules: Iterable[nn.Module], but: Collection[int]):
        """Keep what the modules' quantized weights hold now, where that is page locked; ``but``: ids of
        parameters that stay on the host."""
        for weight in quantized(modules):
            if all(_is_page_locked(each) and id(each) not in but for each in weight.parameters()):
                self._copies[weight] = [parameter.data for parameter in weight.parameters()]

    def take(self, modules: Iterable[nn.Module]) -> dict[int, Tensor]:
        """Let go of the copies of these modules' weights; return parameter's id -> its copy."""
        taken = {}
        for weight in quantized(modules):
            copies = self._copies.pop(weight, ())
            taken |= {id(parameter): copy for parameter, copy in zip(weight.parameters(), copies)}
        return taken

    def forget(self):
        """Let go of all: their memory stays for the next weights (PAGE_LOCKED)."""
        self._copies.clear()


COPIES = StoredCopies()


def page_locked_bytes() -> int:
    """Return what this rank keeps of page-locked memory for the next weights that leave."""
    return PAGE_LOCKED.reusable + COPIES.bytes


@torch.inference_mode(False)  # parameters outlive the request that brings them back
def to_host(modules: Iterable[nn.Module], pinned: bool = True, ranks: int | None = None):
    """Move parameters and buffers to host memory, page locked (``pinned``) to come back at the speed of the
    bus. Those on the meta device and on the host stay. ``ranks``: how many do so now; None: all."""
    modules = list(modules)
    copies = COPIES.take(modules)
    stored = {id(parameter) for weight in quantized(modules) for parameter in weight.parameters()}
    # apart from the rest, whose memory does not wait for it
    memory = HostMemory(pinned)
    memory_of_stored = HostMemory(pinned)
    _make_room(modules, copies, ranks)

    def moved(tensor: Tensor) -> Tensor:
        if not _leaves(tensor):
            return tensor
        if id(tensor) in copies:
            return copies[id(tensor)]
        place = memory_of_stored if id(tensor) in stored else memory
        return place.like(tensor).copy_(tensor)

    for module in modules:
        module._apply(moved)


def _make_room(modules: Iterable[nn.Module], copies: Collection[int], ranks: int | None):
    """Give up the copies of other models' weights where host memory has no room for them besides."""
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    leaving = sum(each.nbytes for each in tensors if _leaves(each) and id(each) not in copies)
    # the others need about as many
    if not has_room(max(0, leaving - PAGE_LOCKED.reusable) * _ranks_here(ranks)):
        COPIES.forget()


def _ranks_here(ranks: int | None = None) -> int:
    """Return how many of ``ranks`` share this host's memory at most: often the one on ComfyUI's GPU alone."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return here if ranks is None else min(here, ranks)


def _leaves(tensor: Tensor) -> bool:
    return tensor.device.type not in ("meta", "cpu")


def _is_page_locked(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.is_pinned()


@torch.inference_mode(False)
def to_device(
    modules: Iterable[nn.Module],
    device: torch.device,
    but: Iterable[nn.Module] = (),
    ranks: int | None = None,
):
    """Move parameters and buffers to ``device``, ``but`` for those of some modules and those on the meta
    device. ``ranks``: how many do so now, all by default."""
    stay = {id(tensor) for module in but for tensor in chain(module.parameters(), module.buffers())}
    modules = list(modules)
    COPIES.keep(modules, stay)

    def moved(tensor: Tensor) -> Tensor:
        here = tensor.is_meta or id(tensor) in stay
        return tensor if here else tensor.to(device, non_blocking=tensor.is_pinned(), copy=True)

    for module in modules:
        module._apply(moved)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # before the host's copies go
    # the others keep about as many
    cached = page_locked_bytes() * _ranks_here(ranks)
    if not has_room(cached, cached):
        COPIES.forget()
        PAGE_LOCKED.give_back()
