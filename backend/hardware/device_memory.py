"""The memory of a rank's device: whose it is, how much of it is free, and whether an error says that it ran
out. ComfyUI's process uses it too, to find which ranks share a GPU with it."""

import ctypes
import os
import platform
import sys
from pathlib import Path

import psutil
import torch

from .cgroup_limits import memory_limits
from .host_system import is_wsl

#: Fraction of the free host memory that parked weights take at most; page locked, it cannot be swapped out.
HOST_SHARE = 0.5
#: What cuBLAS and cuDNN say at their first product, for which they make a handle: on a GPU without room, and
#: where the library itself is broken.
HANDLE_WORDS = ("CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED")
#: How torch's allocator fails instead of saying that memory ran out, where the driver does not list the GPU's
#: processes: on slices of MIG, in containers without NVML's rights (pytorch issues 112377, 197312). It asks
#: for them in that case alone. Other files of torch assert the same of NVML where memory did not run out.
NVML_WORDS = ("NVML_SUCCESS == ", "CUDACachingAllocator.cpp")
#: What libraries say of a GPU without room, if nothing else is known: torch, NCCL ("Failed to CUDA
#: calloc 8388608 bytes"), cuBLAS and cuDNN.
FULL_GPU_WORDS = (
    *("CUDA out of memory", "CUDA error: out of memory", "CUDA calloc", "CUDA malloc"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "DEVICE_ALLOCATION_FAILED"),
    *HANDLE_WORDS,
)
#: A handle, its workspace and its kernels take less: with this much free, it is not memory that is missing.
MIN_HANDLE_BYTES = 10**9
#: What they say when any allocation fails, besides torch.OutOfMemoryError; the last of the CPU's allocator.
_OUT_OF_MEMORY = (
    *("CUDA calloc", "CUDA malloc"),
    *("out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED", "ALLOCATION_FAILED", "CUDA host alloc"),
    *("can't allocate memory", "not enough memory"),
)
#: What CUDA says on WSL where Windows gives a GPU's memory to no allocation (microsoft/WSL issue 41176).
_WSL_WORDS = "CUDA driver error: device not ready"
#: Bytes of a unified GPU's memory that are left to the host, whose programs would be ended or swapped out.
UNIFIED_RESERVE = 2 * 10**9
#: A unified GPU's total is at least this part of the host's (DGX Spark: all). A GH200 has 94 of 525 GiB.
UNIFIED_PART = 0.8
#: Where Linux lists devices by their slots: the memory that firmware sets aside for one of AMD's.
PCI_DEVICES = Path("/sys/bus/pci/devices")

#: 1 in the environment of ranks: their allocator's segments have fixed sizes, and are given back while the
#: whole GPU is waited for. 0: they are to grow, if this torch can have them so.
FIXED_SEGMENTS = "PARALLEL_DIT_FIXED_SEGMENTS"

#: Whether torch's segments on GPUs grow; None before a look has found any.
_grow: bool | None = None


def segments_grow() -> bool:
    """Return whether this rank's allocator never waits for the whole GPU to make room: torch's segments grow,
    by those that there are while a request runs; False as long as there are none, and True where this process
    uses no GPU. What was set says less: torch for ROCm before 7.0 only warns that it has none
    (CUDAAllocatorConfig.h), and torch before 2.9 reads other settings."""
    global _grow
    if os.environ.get(FIXED_SEGMENTS) == "1":
        return False
    if not torch.cuda.is_initialized():  # nor where ranks on the CPU have GPUs next to them
        return True
    if _grow is None and torch.cuda.get_allocator_backend() != "native":
        _grow = False
    elif _grow is None and (segments := torch.cuda.memory_snapshot()):
        _grow = all(segment["is_expandable"] for segment in segments)
    return bool(_grow)


def device_name(device: torch.device) -> str:
    """Name the memory of a device, the same in every process of every machine: ranks whose names are equal
    share it. Empty where torch does not say which GPU it is."""
    if device.type == "cuda":
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    machine = Path("/etc/machine-id")
    return f"memory of {platform.node()} {machine.read_text().strip() if machine.exists() else ''}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that an allocation failed, on a device or on the host. A library's handle
    that could not be made says so where this rank's GPU is full; else the library is broken."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return says_out_of_memory(text) or (any(words in text for words in HANDLE_WORDS) and _is_full())


def says_out_of_memory(text: str) -> bool:
    """Return whether a text says that an allocation failed, on a device or on the host."""
    return any(words in text for words in _OUT_OF_MEMORY) or _is_full_otherwise(text)


def says_full_gpu(text: str) -> bool:
    """Return whether a process has said that its GPU is full, of which nothing else is known."""
    return any(words in text for words in FULL_GPU_WORDS) or _is_full_otherwise(text)


def _is_full_otherwise(text: str) -> bool:
    """Return whether an error says that a GPU is full in words that mean so here, or in this place, alone."""
    return all(words in text for words in NVML_WORDS) or (_WSL_WORDS in text and is_wsl())


def _is_full() -> bool:
    """Return whether the GPU of this rank has no room for a library's handle."""
    if not torch.cuda.is_initialized():  # asking would make a context
        return False
    try:
        return _free_of(torch.cuda.current_device()) < MIN_HANDLE_BYTES
    except RuntimeError:  # the GPU is lost, which says nothing of its memory
        return False


def is_unified(device: torch.device | int) -> bool:
    """Return whether a GPU's memory is the host's: of a DGX Spark, a Jetson and AMD's APUs. A GH200 has two.
    So has an APU whose GPU is given only what the firmware sets aside for it."""
    if isinstance(device, torch.device) and device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    if not getattr(properties, "is_integrated", 0):
        return False
    host = psutil.virtual_memory().total
    if not torch.version.hip:
        return properties.total_memory > UNIFIED_PART * host and not is_wsl()
    own = _set_aside(properties)
    return properties.total_memory <= host if own is None else properties.total_memory > own


def _set_aside(properties) -> int | None:
    """Return the bytes that firmware sets aside for one of AMD's GPUs; None where Linux does not say."""
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return None
    file = PCI_DEVICES / "{:04x}:{:02x}:{:02x}.0".format(*place) / "mem_info_vram_total"
    return int(file.read_text()) if file.exists() else None


def unified_free() -> int:
    """Count the bytes of host memory that a unified GPU may take, the page cache included, which the system
    gives back, without UNIFIED_RESERVE. Limits of containers count nothing: what CUDA and HIP allocate is not
    charged to them."""
    return max(0, psutil.virtual_memory().available - UNIFIED_RESERVE)


def _free_of(device: torch.device | int) -> int:
    """Count the free bytes of a GPU. Of unified memory CUDA counts what the page cache has as taken, and may
    fail to say so; HIP has a limit of its own."""
    if not is_unified(device):
        return torch.cuda.mem_get_info(device)[0]
    if torch.version.hip:
        return min(unified_free(), *torch.cuda.mem_get_info(device))
    return min(unified_free(), torch.cuda.get_device_properties(device).total_memory)


def check_not_lost(device: torch.device, lost: str):
    """Compute a number on a device: after an illegal access, say, it computes none for this process. Raises
    RuntimeError with the words ``lost``."""
    try:
        torch.ones(1, device=device).item()
    except Exception as error:
        if not is_out_of_memory(error):
            raise RuntimeError(lost) from error


class DeviceMemory:
    """The memory of one device, in bytes. Tests inject another class with these methods."""

    def __init__(self, device: torch.device):
        self.device = device

    @property
    def name(self) -> str:
        """The device's name, as device_name gives it."""
        return device_name(self.device)

    @property
    def is_host(self) -> bool:
        """Return whether weights that wait in host memory lie in the same memory."""
        return self.device.type == "cpu" or is_unified(self.device)

    def free(self) -> int:
        """Count what any process on the device may still allocate; on the CPU with swap."""
        return _free_of(self.device) if self.device.type == "cuda" else host_free()

    def cached(self) -> int:
        """Count what this process's allocator holds and does not use: free for this process alone."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def reserved(self) -> int:
        """Count what this process's allocator has, used or not; 0 on the CPU."""
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def release(self):
        """Give cached memory back to the device; on the CPU malloc's free pages, between blocks too."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim_heap()


def trim_heap():
    """Give free pages of malloc's heaps back to the system; nothing where the library is not glibc."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def host_free(swap: bool = True) -> int:
    """Count the bytes of host memory that this process may still take, and of ``swap``."""
    free = psutil.virtual_memory().available + (psutil.swap_memory().free if swap else 0)
    return min([free, *(max(0, limit - used) for limit, used in memory_limits())])


def host_bytes() -> int:
    """Count the bytes of host memory that this process may have."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in memory_limits())])
