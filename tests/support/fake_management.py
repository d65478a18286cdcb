"""ComfyUI's memory manager over devices that are not there: comfy.model_management's rules (0.33) on numbers.

A device is a count of bytes; models and ranks take from it and give back.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class FakeDevice:
    """``free``: bytes that nobody has; ``cached``: of ComfyUI's allocator, which it counts as free."""

    free: int
    cached: int = 0


@dataclass(eq=False)
class FakeModel:
    """A model of ComfyUI's on a device; also the entry of the list that holds it."""

    device: torch.device
    size: int
    where: FakeDevice
    is_on_ranks: bool = False
    loaded: bool = True
    currently_used: bool = True

    @property
    def model(self):
        return self

    def unload(self):
        """Its memory goes to ComfyUI's allocator first."""
        self.where.cached += self.size
        self.loaded = False


@dataclass
class FakeManagement:
    """What client/room.py needs of comfy.model_management."""

    devices: dict[torch.device, FakeDevice]
    current_loaded_models: list[FakeModel] = field(default_factory=list)
    reserved: int = 400 << 20
    asked: list[tuple[int, torch.device]] = field(default_factory=list)

    def get_torch_device(self):
        return next(iter(self.devices))

    def extra_reserved_memory(self):
        return self.reserved

    def soft_empty_cache(self):
        for device in self.devices.values():
            device.free += device.cached
            device.cached = 0

    def free_memory(self, memory_required, device, keep_loaded=()):
        """Unload models of the device until enough is free, in ComfyUI's eyes."""
        self.asked.append((memory_required, device))
        memory = self.devices[device]
        for model in list(self.current_loaded_models):
            if model.device == device and model not in keep_loaded:
                model.currently_used = False
                if memory_required > memory.free + memory.cached:
                    model.unload()
                    self.current_loaded_models.remove(model)

    def load(self, size, device) -> FakeModel:
        """Load a model of ComfyUI's, as a text encoder is: it takes what is free."""
        memory = self.devices[device]
        self.soft_empty_cache()
        assert memory.free >= size, "ComfyUI itself would have run out of memory"
        memory.free -= size
        model = FakeModel(device, size, memory)
        self.current_loaded_models.insert(0, model)
        return model
