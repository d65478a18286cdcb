"""How scripts/doctor.py reads the memory of GPUs, from a driver that is not here."""

import ctypes
from types import SimpleNamespace

import doctor_gpu_memory
import pytest
import torch
from doctor_gpu_memory import GpuMemory, MemoryInfo
from doctor_memory import MemoryWatch

from backend.client.auto.measurements import gpu_uuid

#: UUID -> bytes in total, and free.
CARDS = {b"GPU-aa": (16 << 30, 15 << 30), b"GPU-bb": (16 << 30, 4 << 30)}


class Driver:
    """NVML of two cards, which torch numbers the other way around."""

    def __init__(self, fails: str = ""):
        self.fails = fails

    def nvmlInit_v2(self):
        return 9 if self.fails == "init" else 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        if uuid not in CARDS:
            return 6
        handle._obj.value = 1 + list(CARDS).index(uuid)
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, info):
        found = info._obj
        assert isinstance(found, MemoryInfo) and ctypes.sizeof(found) == 24
        found.total, found.free = list(CARDS.values())[handle.value - 1]
        return 999 if self.fails == "later" else 0


@pytest.fixture
def contexts(monkeypatch):
    """GPUs on which the process that asks torch for their memory makes a context."""
    made = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: made.append(index) or (1 << 30, 3 << 30))
    uuids = ["bb", "aa", "cc"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    return made


def test_memory_is_read_without_a_context(monkeypatch, contexts):
    monkeypatch.setattr(doctor_gpu_memory.ctypes, "CDLL", lambda name: Driver())
    lab = SimpleNamespace(device="cuda", gpus=[0, 1, 2])
    lab.backend = lambda config: SimpleNamespace(welcome=SimpleNamespace(pids=[7, 8]))
    watch = MemoryWatch(lab, None)
    assert watch.before == [12 << 30, 1 << 30] and watch.stop() == [0, 0] and not contexts


@pytest.mark.parametrize("fails, gpus", [("init", [0, 1]), ("", [0, 2])])
def test_where_the_driver_does_not_answer_torch_does(contexts, fails, gpus):
    memory = GpuMemory(gpus, Driver(fails))
    assert not memory.is_by_driver and memory.taken() == [2 << 30] * 2 and contexts == gpus


def test_without_the_library_torch_answers(monkeypatch, contexts):
    monkeypatch.setattr(doctor_gpu_memory, "LIBRARY", "libnone-of-this-name.so")
    assert GpuMemory([0]).taken() == [2 << 30] and contexts == [0]


def test_a_driver_that_no_longer_answers_is_named(contexts):
    with pytest.raises(OSError, match="restart the machine"):
        GpuMemory([0], Driver("later")).taken()
    assert gpu_uuid(0) == "bb" and not contexts


def test_memory_that_is_the_hosts_is_read_without_the_driver(monkeypatch, contexts):
    """NVML refuses that of a DGX Spark, which was said to need a restart."""
    spark = SimpleNamespace(uuid="aa", total_memory=120 << 30)
    monkeypatch.setattr(doctor_gpu_memory, "is_unified", lambda gpu: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: spark)
    monkeypatch.setattr(doctor_gpu_memory, "unified_free", lambda: 90 << 30)
    assert GpuMemory([0], Driver("later")).taken() == [30 << 30] and not contexts
    monkeypatch.setattr(torch.version, "hip", "7.2")  # which has a limit of its own
    assert GpuMemory([0], Driver("later")).taken() == [2 << 30] and contexts == [0]


def test_a_gpu_with_memory_of_its_own_is_read_by_the_driver_next_to_one_that_has_the_hosts(
    monkeypatch, contexts
):
    monkeypatch.setattr(doctor_gpu_memory, "is_unified", lambda gpu: gpu == 1)
    monkeypatch.setattr(doctor_gpu_memory, "_taken", lambda gpu: 30 << 30)
    alone = GpuMemory([0], Driver()).taken()
    assert GpuMemory([0, 1], Driver()).taken() == [*alone, 30 << 30] and not contexts
