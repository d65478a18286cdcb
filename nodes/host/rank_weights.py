"""A transformer's weights on the ranks, as ComfyUI's memory manager sees them: one entry of its list for each
device, with the device and the size that they have there. So the manager takes them where that frees the
device in question, and there alone; *Unload Models* takes them anywhere."""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import comfy.model_management
import comfy.model_patcher
import torch
from comfy_execution.utils import get_executing_context

from ...backend.client.auto import planning
from ...backend.client.room import Room, local_gpus
from ...backend.hardware.device_memory import device_name
from ...backend.protocol import Loaded, Welcome
from ...backend.runtime.callbacks import nothing
from ..graph.queued_graph import running
from .graph_requests import loaded_models

Free = Callable[[tuple[int, ...]], bool]
#: Bytes that ComfyUI's manager has to free for Unload Models. Under --disable-smart-memory it has to free a
#: hundred times as many whatever is needed.
ALL_MODELS = 1e30


class TransformerOnRanks(torch.nn.Module):
    """An empty module whose class name ComfyUI logs."""


class ManagerEntry(comfy.model_management.LoadedModel):
    """An entry of ComfyUI's list that tells the weights whether all models go or others need their memory,
    and stays there while they do. The manager takes it after all others: it costs a copy both ways, or a
    load, and dynamic models yield by themselves."""

    def model_unload(self, memory_to_free=None, unpatch_weights=True):
        """Unload as ComfyUI asks; return False, with the weights back, while a request needs them."""
        self.model.all_go = memory_to_free is not None and math.isclose(memory_to_free, ALL_MODELS)
        gone = super().model_unload(memory_to_free, unpatch_weights)
        if gone and self.model.held:  # a request runs
            self.model_load()
            return False
        return gone

    def model_offloaded_memory(self):
        """Return minus the bytes on the device. The manager asks where a node wants memory there: a step that
        goes on after Cancel may yet take what is free."""
        if get_executing_context() is not None:
            self.model.settle()
        return -self.model.loaded_size()


class RankWeights(comfy.model_patcher.ModelPatcher):
    """``size`` bytes of weights on ``device``, those of ``ranks``. ``free``: takes them from such ranks, from
    every one where it is given none; whether it did."""

    is_on_ranks = True

    def __init__(self, device: torch.device, size: int, free: Free, ranks: tuple[int, ...]):
        super().__init__(TransformerOnRanks(), device, torch.device("cpu"), size)
        self.free = free
        #: Waits for the end of a step that goes on after Cancel.
        self.settle = nothing
        self.ranks = ranks
        self.held = False
        #: Whether they left with all models, by somebody's wish.
        self.all_go = False
        #: How many hold it down: nothing is taken, but for ranks.
        self.holders = 0

    def register(self):
        """Put the entry into ComfyUI's list, unless it is there: the ranks have loaded it."""
        entry = ManagerEntry(self)
        listed = comfy.model_management.current_loaded_models
        if entry not in listed:
            entry.model_load()
            listed.insert(0, entry)
        self.held = True
        self.all_go = False

    @property
    def is_held_down(self) -> bool:
        """Return whether nothing is taken now."""
        return self.holders > 0 and not Room.is_making

    def loaded_size(self) -> int:
        """Count the bytes that the ranks hold on their devices."""
        return self.size if self.held else 0

    def current_loaded_device(self) -> torch.device:
        """Return where the weights are."""
        return self.load_device if self.held else self.offload_device

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False) -> int:
        """Load nothing here (0 bytes): the ranks load by themselves."""
        return 0

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        """Free all of it: a model without one of its layers is of no use to the ranks. Returns bytes."""
        if self.is_held_down:
            return memory_to_free  # the entry stays
        size = self.loaded_size()
        if not self.free_weights():
            return 0
        self._note_left(int(max(0, size - memory_to_free)))
        return size

    def detach(self, unpatch_all=True):
        """Free all of it, where the manager needs as much or more, or wants all."""
        if unpatch_all and not self.is_held_down and self.free_weights():
            self._note_left(0)
        return self.model

    def _note_left(self, size: int):
        """Have auto know what could have stayed: ``size`` of this entry, and others there. Not where ranks
        asked for the room, where all models go by somebody's wish, or for a graph without ours."""
        wished = self.all_go or get_executing_context() is None
        if self.load_device.type != "cuda" or Room.is_making or wished or not loaded_models(running()):
            return
        entries = (entry.model for entry in comfy.model_management.current_loaded_models)
        others = (each for each in entries if isinstance(each, RankWeights) and each is not self)
        held = sum(each.loaded_size() for each in others if each.load_device == self.load_device)
        planning.note_left(self.load_device.index or 0, size + held)

    def free_weights(self) -> bool:
        """Free the weights on the ranks of this device, on every rank where all models go; return whether
        they had them."""
        if not self.held or not self.free(() if self.all_go else self.ranks):
            return False
        self.held = False
        return True


@cache
def host_room() -> Room:
    """Return the room on the GPUs of this ComfyUI, of which there are none in its CPU mode."""
    on_gpu = comfy.model_management.get_torch_device().type == "cuda"
    return Room(comfy.model_management, local_gpus() if on_gpu else {})


def dynamic_weights(index: int) -> int:
    """Count what ComfyUI's dynamic models (0.33) hold of a GPU, outside of torch's allocator. They leave when
    room is made, as ModelPatcher.get_free_memory counts on."""
    if not getattr(getattr(comfy, "memory_management", None), "aimdo_enabled", False):
        return 0
    from comfy_aimdo.model_vbar import vbars_analyze  # pyright: ignore[reportMissingImports]  # ComfyUI's

    return vbars_analyze(index)


def entries(loaded: Loaded, welcome: Welcome, free: Free) -> list[RankWeights]:
    """Return an entry for each of this machine's devices that holds a transformer's weights; ``free`` as in
    RankWeights."""
    cpu = torch.device("cpu")
    devices = host_room().gpus | {device_name(cpu): cpu}
    ranks: dict[torch.device, list[int]] = defaultdict(list)
    for rank, name in enumerate(welcome.devices):
        if name in devices:
            ranks[devices[name]].append(rank)
    sizes = [report["weight_bytes"] for report in loaded.info["ranks"]]
    return [
        RankWeights(device, sum(sizes[rank] for rank in own), free, tuple(own))
        for device, own in ranks.items()
    ]


def may_hold_memory(entries: list[RankWeights]) -> bool:
    """Return whether a model may hold devices' memory: not where ComfyUI knows that all of it is parked."""
    return not entries or any(entry.held for entry in entries)
