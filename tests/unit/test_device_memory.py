"""Free, cached and given-back memory of a GPU that is not there, and errors that say that it ran out."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from backend.client.launching.rank_environment import sanitized_environment
from backend.config import ParallelConfig
from backend.hardware import device_memory
from backend.hardware.device_memory import FIXED_SEGMENTS, DeviceMemory, is_out_of_memory, segments_grow

GPU = torch.device("cuda", 1)
GROWING, FIXED = {"is_expandable": True}, {"is_expandable": False}


@pytest.fixture
def cuda(monkeypatch) -> list[str]:
    """torch.cuda with 7 of 24 bytes free on GPU 1, 5 reserved and 2 of these in use; the calls of it."""
    calls = []

    def answering(name, answer):
        def answered(*devices):
            assert devices in ((), (GPU,))
            calls.append(name)
            return answer

        monkeypatch.setattr(torch.cuda, name, answered)

    answering("mem_get_info", (7, 24))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    answering("memory_reserved", 5)
    answering("memory_allocated", 2)
    answering("empty_cache", None)
    return calls


def test_memory_of_a_gpu_is_what_cuda_says(cuda):
    memory = DeviceMemory(GPU)
    assert (memory.free(), memory.cached()) == (7, 3)
    memory.release()
    assert cuda == ["mem_get_info", "memory_reserved", "memory_allocated", "empty_cache"]


GB = 10**9
#: HIP's version, GB free and in all that CUDA or HIP names, GB available and in all of the host, GB that are
#: free, and whether these are the same bytes.
UNIFIED = {
    "the page cache is given back": ("", (2, 120), (90, 122), 88, True),
    "the GPU's total is the most": ("", (2, 100), (110, 122), 100, True),
    "the host keeps what it has left": ("", (2, 120), (1, 122), 0, True),
    "a GH200 has two memories": ("", (80, 101), (500, 564), 80, False),
    "HIP has a limit of its own": ("7.2", (50, 94), (90, 122), 50, True),
    "the host has less than HIP's limit": ("7.2", (93, 110), (82, 122), 80, True),
    "HIP's total is the most": ("7.2", (93, 60), (82, 122), 60, True),
    "memory that the firmware sets aside is the GPU's alone": ("7.2", (90, 96), (20, 31), 90, False),
}


def unified(monkeypatch, hip: str, device: tuple[int, int], host: tuple[int, int]):
    """Have GPU 1, whose memory is ``device`` (GB free, total), share that of the ``host`` (available,
    total)."""
    properties = SimpleNamespace(is_integrated=1, total_memory=device[1] * GB)
    properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id = 0, 0xC5, 0
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (device[0] * GB, device[1] * GB))
    monkeypatch.setattr(torch.version, "hip", hip or None)
    memory = SimpleNamespace(available=host[0] * GB, total=host[1] * GB)
    monkeypatch.setattr(device_memory.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(device_memory.psutil, "swap_memory", lambda: SimpleNamespace(free=1000))


@pytest.mark.parametrize("hip, device, host, free, is_shared", UNIFIED.values(), ids=UNIFIED)
def test_memory_that_gpu_and_host_share_is_what_the_host_has(monkeypatch, hip, device, host, free, is_shared):
    """A container's limit counts nothing: what CUDA allocates is not charged to it. Nor does swap."""
    unified(monkeypatch, hip, device, host)
    monkeypatch.setattr(device_memory, "memory_limits", lambda: [(1, 0)])
    assert DeviceMemory(GPU).free() == free * GB
    assert device_memory.is_unified(GPU) == DeviceMemory(GPU).is_host == is_shared
    assert not device_memory.is_unified(torch.device("cpu")) and DeviceMemory(torch.device("cpu")).is_host


def test_cuda_need_not_say_what_is_free_of_memory_that_is_the_hosts(monkeypatch):
    """On a DGX Spark it may fail to."""

    def failing(device):
        raise RuntimeError("CUDA error: out of memory")

    unified(monkeypatch, "", (2, 120), (90, 122))
    monkeypatch.setattr(torch.cuda, "mem_get_info", failing)
    assert DeviceMemory(GPU).free() == 88 * GB


def test_a_gpu_of_the_linux_of_windows_has_the_memory_that_cuda_says(monkeypatch):
    unified(monkeypatch, "", (2, 120), (90, 122))
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert DeviceMemory(GPU).free() == 2 * GB and not device_memory.is_unified(GPU)


@pytest.mark.parametrize("set_aside, total, host, is_shared", [(1, 137, 125, True), (48, 48, 79, False)])
def test_an_apus_memory_is_the_hosts_where_it_is_more_than_is_set_aside(
    monkeypatch, tmp_path, set_aside, total, host, is_shared
):
    """Against the host's total both would be told wrongly: GTT of more than there is, and a part of it."""
    unified(monkeypatch, "7.2", (40, total), (70, host))
    monkeypatch.setattr(device_memory, "PCI_DEVICES", tmp_path)
    (tmp_path / "0000:c5:00.0").mkdir()
    (tmp_path / "0000:c5:00.0" / "mem_info_vram_total").write_text(f"{set_aside * GB}\n")
    assert device_memory.is_unified(GPU) == is_shared


def test_memory_of_the_cpu_does_not_touch_cuda(cuda, monkeypatch):
    """Which would make a context, or fail."""
    monkeypatch.setattr(device_memory, "host_free", lambda: 11)
    memory = DeviceMemory(torch.device("cpu"))
    memory.release()
    assert (memory.free(), memory.cached(), cuda) == (11, 0, [])
    assert memory.name.startswith(f"memory of {platform.node()}")


#: Leaves a gap of 40 MB in its heap, under a block that stays, and prints megabytes: with the gap, and after
#: an engine's unload.
GAP = """
import psutil, torch
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh

def held():
    return psutil.Process().memory_info().rss // 2**20

engine = Engine(ParallelConfig(), mesh.single())
blocks = [torch.ones(2**20) for _ in range(10)]
above = torch.ones(2**18)
del blocks
before = held()
engine.unload("model")
print(before, held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others give no free memory back when asked")
def test_the_heap_of_a_cpu_rank_shrinks_when_a_model_leaves():
    env = sanitized_environment(dict(os.environ), ParallelConfig(device="cpu"), "cpu")
    found = subprocess.run([sys.executable, "-c", GAP], env=env, capture_output=True, text=True, check=True)
    before, after = map(int, found.stdout.split())
    assert before - after >= 35


def test_without_glibc_nothing_is_trimmed(monkeypatch):
    """musl has no malloc_trim."""
    monkeypatch.setattr(device_memory.ctypes, "CDLL", lambda name: object())
    device_memory.trim_heap()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA failed."),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8000 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("NCCL error: ncclUnhandledCudaError. Last error: Cuda failure 2 'out of memory'"),
        RuntimeError("NCCL error: Failed to CUDA calloc 8388608 bytes"),
        RuntimeError("NCCL error: Failed to CUDA malloc 8388608 bytes"),
        RuntimeError("NCCL error: Failed to CUDA host alloc 8388608 bytes"),
        RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1154'),
        RuntimeError(
            "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
            '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1124, please report a bug to PyTorch.'
        ),
    ],
    ids=str,
)
def test_what_says_that_memory_ran_out(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("library", ["CUBLAS", "CUDNN"])
@pytest.mark.parametrize("free, is_full", [(10**8, True), (2 * 10**9, False), (None, False)])
def test_a_handle_that_is_not_made_is_out_of_memory_on_a_full_gpu(library, free, is_full, monkeypatch):
    """With room the library is broken; a GPU that is lost (None) does not say. The probe, of which its client
    has the words alone, is always taken for one of a full GPU."""

    def asked(device):
        if free is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return free, 24 * 10**9

    error = RuntimeError(f"error: {library}_STATUS_NOT_INITIALIZED when calling `create(handle)`")
    assert not is_out_of_memory(error)  # this process has no GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    assert is_out_of_memory(error) == is_full
    assert any(words in str(error) for words in device_memory.FULL_GPU_WORDS)


def test_a_handle_that_is_not_made_next_to_a_full_page_cache_is_broken(monkeypatch):
    unified(monkeypatch, "", (0, 120), (90, 122))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not is_out_of_memory(RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED"))


def test_a_device_that_is_not_ready_is_full_on_wsl_alone(monkeypatch):
    error = RuntimeError("CUDA driver error: device not ready")
    found = []
    for release in ("6.8.0-generic", "6.6.87.2-microsoft-standard-WSL2"):
        monkeypatch.setattr(platform, "release", lambda release=release: release)
        found.append((is_out_of_memory(error), device_memory.says_full_gpu(str(error))))
    assert found == [(False, False), (True, True)]
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "c10/cuda/PeerToPeerAccess.cpp":60'),
        OSError("out of memory"),
        ValueError("not enough memory"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_what_does_not(error):
    """A file's reader may say the words of something else."""
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "said, allocator, segments, expected",
    [
        ("0", "native", [GROWING, GROWING], True),
        (None, "native", [GROWING], True),  # of ranks that torchrun alone has started
        ("0", "native", [FIXED, FIXED], False),
        ("0", "native", [GROWING, FIXED], False),
        ("0", "native", [], False),
        ("1", "native", [GROWING], False),
        ("0", "cudaMallocAsync", [GROWING], False),
    ],
)
def test_a_rank_asks_torch_whether_its_segments_grow(said, allocator, segments, expected, monkeypatch):
    """Torch for ROCm before 7.0 warns that it has none, whatever was set, and allocates fixed ones."""
    monkeypatch.delenv(FIXED_SEGMENTS, raising=False)
    if said is not None:
        monkeypatch.setenv(FIXED_SEGMENTS, said)
    monkeypatch.setattr(device_memory, "_grow", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert segments_grow() == expected


def test_a_rank_without_segments_asks_again(monkeypatch):
    """It has allocated nothing yet, which says nothing of what it will. What was found once stays."""
    found = [[], [GROWING]]
    monkeypatch.delenv(FIXED_SEGMENTS, raising=False)
    monkeypatch.setattr(device_memory, "_grow", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # of a rank on the CPU
    assert segments_grow()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found.pop(0))
    assert [segments_grow() for _ in range(3)] == [False, True, True]
