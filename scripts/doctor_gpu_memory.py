"""Memory that all programs have of GPUs, by the driver's own library (NVML).

torch.cuda.mem_get_info would make a CUDA context of 300 to 500 MB on each GPU, in the process that asks.
"""

import ctypes
from typing import Any

import torch

from backend.client.auto.measurements import gpu_uuid
from backend.hardware.device_memory import is_unified, unified_free

#: NVIDIA's library, which comes with the driver as nvidia-smi does.
LIBRARY = "libnvidia-ml.so.1"


class MemoryInfo(ctypes.Structure):
    """nvmlMemory_t of nvml.h: bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class GpuMemory:
    """Reads what is taken of GPUs, as torch numbers them. ``library``: NVML's, by default this machine's."""

    def __init__(self, gpus: list[int], library: Any = None):
        self.gpus = gpus
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
            self._handles = self._found()
        except (OSError, AttributeError):  # AMD's GPUs, or a container without it
            self._handles = []

    @property
    def is_by_driver(self) -> bool:
        """Return whether the driver answers, without a context in this process."""
        return len(self._handles) == len(self.gpus)

    def taken(self) -> list[int]:
        """Return the bytes of each GPU that are not free."""
        if not self.is_by_driver:
            return [_taken(index) for index in self.gpus]
        sizes = []
        for gpu, handle in zip(self.gpus, self._handles):
            if handle is None:
                sizes.append(_taken(gpu))
                continue
            info = MemoryInfo()
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(info)):
                raise OSError("the driver no longer answers (nvmlDeviceGetMemoryInfo); restart the machine")
            sizes.append(info.total - info.free)
        return sizes

    def _found(self) -> list[ctypes.c_void_p | None]:
        """Return NVML's handle of each GPU, of all or of none: it numbers GPUs by their slots. None stands
        for a GPU that has the host's memory, of which NVML says nothing."""
        if self._library.nvmlInit_v2():
            return []
        handles: list[ctypes.c_void_p | None] = []
        for gpu in self.gpus:
            if is_unified(gpu):
                handles.append(None)
                continue
            uuid, handle = gpu_uuid(gpu), ctypes.c_void_p()
            names = [f"{prefix}-{uuid}".encode() for prefix in ("GPU", "MIG")]
            if not uuid or all(
                self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) for name in names
            ):
                return []
            handles.append(handle)
        return handles


def _taken(gpu: int) -> int:
    """Return the bytes of a GPU of which the driver says nothing that are not free."""
    if is_unified(gpu) and not torch.version.hip:  # whose limit HIP alone knows
        return torch.cuda.get_device_properties(gpu).total_memory - unified_free()
    free, total = torch.cuda.mem_get_info(gpu)
    return total - free
