"""Room on the GPUs that ranks share with this process, made by ComfyUI's memory manager. It counts what its
own process caches as free, which is of no use to a rank: the cache goes first and last."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from ..hardware.device_memory import device_name
from ..protocol import RefusedError, Sample, Welcome

#: A rank's CUDA context, its libraries and their workspaces, before anything is loaded.
CONTEXT_BYTES = 10**9


def local_gpus() -> dict[str, torch.device]:
    """Return the GPUs that this process sees, by the name of their memory."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {name: device for device in devices if (name := device_name(device))}


@dataclass(eq=False)
class Room:
    """Makes room on GPUs that ranks share with this process, through ComfyUI's memory manager.
    ``management``: comfy.model_management, or what has its functions. ``gpus``: as local_gpus. ``keep``:
    entries of current_loaded_models that stay. ``used``: devices that this process has had models on."""

    #: While true models leave for ranks, not for one of this process.
    is_making: ClassVar[bool] = False
    management: Any
    gpus: dict[str, torch.device]
    keep: list = field(default_factory=list)
    used: set[torch.device] = field(default_factory=set)

    def keeping(self, entries: Collection) -> "Room":
        """Return the same room, for which ``entries`` stay."""
        return replace(self, keep=list(entries))

    def shared_ranks(self, welcome: Welcome) -> list[int]:
        """Return the ranks on GPUs of this process."""
        own = self._own_gpus()
        return [rank for rank, name in enumerate(welcome.devices) if self.gpus.get(name) in own]

    def _own_gpus(self) -> set[torch.device]:
        """Return the devices on which this process computes, or has had models of its own: an encoder that
        ComfyUI unloads leaves its list, and comes back for the next prompt."""
        self.used |= {
            loaded.device
            for loaded in self.management.current_loaded_models
            if not getattr(loaded.model, "is_on_ranks", False)
        }
        return {self.management.get_torch_device(), *self.used}

    def make(self, welcome: Welcome, lacking: dict[int, int]):
        """Have as many bytes free on the device of each rank as it is ``lacking``, as far as unloading
        ComfyUI's models gets."""
        for rank, size in lacking.items():
            device = self.gpus.get(welcome.devices[rank])
            if device is not None:
                self.free(size, device)

    def make_for_start(self, gpu_indices: list[int]):
        """Have room for the ranks' own CUDA contexts, on those of the GPUs of these indices that this process
        uses: asking for another one's memory would make a context of this process on it, for good."""
        for device in (torch.device("cuda", index) for index in gpu_indices):
            if device in self._own_gpus():
                self.free(CONTEXT_BYTES, device)

    def free(self, size: int, device: torch.device):
        """Have ``size`` bytes free on ``device``, and what ComfyUI leaves to other programs."""
        management = self.management
        management.soft_empty_cache()
        Room.is_making = True
        try:
            management.free_memory(size + management.extra_reserved_memory(), device, self.keep)
        finally:
            Room.is_making = False
        management.soft_empty_cache()


def with_room(room: Room | None, client: Any, message, run: Callable, all_ranks: bool = False):
    """Run a message. Where ranks lack memory on devices of this process, make ``room`` and run it again:
    between the runs, as the backend is locked during one, and its own models may have to go. ``all_ranks``:
    other models can leave the ranks, so what is likely needed counts on the other ranks, too."""
    shared = room.shared_ranks(client.welcome) if room else []
    others = [rank for rank in range(client.welcome.world_size) if rank not in shared] if all_ranks else []
    if room is None or not shared:
        return run(replace(message, can_make_room=others) if others else message)
    fields = {"shared_ranks": shared} if isinstance(message, Sample) else {}
    try:
        return run(replace(message, can_make_room=[*shared, *others], **fields))
    except RefusedError as error:
        lacking = error.lacking
        here = lacking.keys() & set(shared)
        elsewhere = lacking.keys() - set(shared)
        if not here or (others and elsewhere):
            raise
    if not elsewhere:  # else it is refused all the same, and says what would fit
        room.make(client.welcome, lacking)
    return run(replace(message, can_make_room=others, **fields))
