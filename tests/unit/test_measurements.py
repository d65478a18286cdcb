"""What is measured for the planner: by which process, and for which GPUs."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import doctor_facts
import interpreters
import pytest

from backend.client import cache_files
from backend.client.auto import driver_query, measurements
from backend.client.auto.model_choice import ModelChoice
from backend.client.launching import nccl_settings
from backend.client.launching.dependencies import require_dependencies
from backend.planner.machine import Machine


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """The working directory has a package that is called backend."""
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend/__init__.py").write_text("raise ImportError('this is another backend')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_package_named_backend_where_comfyui_runs_does_not_measure(foreign, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(foreign / "cache"))
    rates = measurements.machine_rates("cpu", [0], lambda: None, lambda line: None)
    assert rates.ranks == 1 and rates.gemm > 0


def test_nor_is_it_asked_for_the_packages_of_the_ranks(foreign):
    (foreign / "requirements.txt").write_text("torch\n")
    python = interpreters.recording(foreign / "python", foreign / "log")
    require_dependencies(foreign / "requirements.txt", str(python))


@pytest.mark.parametrize("name", nccl_settings.LINK_SETTINGS)
def test_rates_are_measured_again_where_nccl_takes_another_way(monkeypatch, tmp_path, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def measure() -> dict:
        measured.append(os.environ.get(name))
        return {}

    for value in (None, None, "1", "0", "1"):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        cache_files.read_or_measure("machine", measurements._machine_key("cpu", [0]), measure, dict)
    assert measured == [None, "1", "0"]


def gpus(monkeypatch, uuids: tuple[str, ...]):
    """Have torch see GPUs of one name with these UUIDs; empty: it does not say which."""
    monkeypatch.setattr(measurements.torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(measurements.torch.cuda, "get_device_name", lambda index: "A")
    properties = [SimpleNamespace(uuid=uuid) if uuid else SimpleNamespace() for uuid in uuids]
    monkeypatch.setattr(measurements.torch.cuda, "get_device_properties", lambda at: properties[at.index])


def rates(names: tuple[str, ...], speeds: tuple[float, ...]) -> dict:
    found = Machine("A", 1e14, 1e14, 1e12, 1e10, {2: 1e10}, names=names, speeds=speeds)
    return json.loads(json.dumps(found.as_dict()))


def measured_machine(monkeypatch, *answers: dict) -> Machine:
    """The rates of two GPUs in a new process, whose probes would find ``answers`` in turn."""
    left = list(answers)
    monkeypatch.setattr(cache_files, "_passing", {})  # of another process
    monkeypatch.setattr(measurements, "measured_rates", lambda *_: left.pop(0))
    for _ in range(2):  # once a process at most
        machine = measurements.machine_rates("cuda", [0, 1], lambda: None, lambda line: None)
    return machine


def test_a_gpu_that_others_use_meanwhile_is_measured_again_by_the_next_process(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus(monkeypatch, ("a", "b"))
    busy = measured_machine(monkeypatch, rates(("A", "A"), (2.0, 1.0)))
    assert busy.speeds == (2.0, 1.0) and "measured again at the next start" in busy.line
    assert not list(cache_files.cache_folder().iterdir())
    free = measured_machine(monkeypatch, rates(("A", "A"), (1.0, 1.0)))
    assert free.speeds == (1.0, 1.0) and not free.line
    assert measured_machine(monkeypatch) == free


def test_gpus_of_two_names_are_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus(monkeypatch, ("a", "b"))
    unlike = measured_machine(monkeypatch, rates(("B", "A"), (2.0, 1.0)))
    assert unlike.line.endswith("(one timed step).") and measured_machine(monkeypatch) == unlike


@pytest.mark.parametrize(
    "before, now, is_known",
    [
        (("a", "b"), ("a", "b"), True),
        (("a", "b"), ("c", "d"), False),
        (("a", "b"), ("b", "c"), False),
        (("", ""), ("", ""), True),  # torch does not say which
        (("a", "a"), ("a", "a"), True),  # slices of one card
    ],
)
def test_what_was_measured_is_of_these_cards(monkeypatch, tmp_path, before, now, is_known):
    """A scheduler numbers the cards of every job from 0. A way between GPUs is that of each two of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus(monkeypatch, before)
    alike = rates(("A", "A"), (1.0, 1.0))
    measured_machine(monkeypatch, alike)
    way = {"NCCL_P2P_DISABLE": "1"}
    nccl_settings.save_way({}, [0, 1], way)
    gpus(monkeypatch, now)
    assert measurements.is_measured("cuda", [0, 1]) is is_known
    assert nccl_settings.saved_way({}, [0, 1]) == (way if is_known else {})


def test_a_way_between_cards_stays_where_they_are_numbered_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus(monkeypatch, ("a", "b", "c"))
    nccl_settings.save_way({}, [0, 1], way := {"NCCL_P2P_DISABLE": "1"})
    gpus(monkeypatch, ("c", "b", "a"))
    assert nccl_settings.saved_way({}, [1, 2]) == way and nccl_settings.saved_way({}, [0, 1]) == {}


def test_a_way_of_a_group_with_slices_of_one_card_is_that_of_each_two(monkeypatch, tmp_path):
    """The group is cached under numbers, and two of it have UUIDs that differ."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus(monkeypatch, ("a", "a", "b"))
    nccl_settings.save_way({}, [0, 1, 2], way := {"NCCL_P2P_DISABLE": "1"})
    assert nccl_settings.saved_way({}, [1, 2]) == way


@pytest.mark.parametrize("way", nccl_settings.WAYS[:3])
def test_what_is_measured_later_counts_instead_of_what_is_cached_under_numbers(monkeypatch, tmp_path, way):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus(monkeypatch, ("a", "a"))
    nccl_settings.save_way({}, [0, 1], {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})
    gpus(monkeypatch, ("a", "b"))
    nccl_settings.save_way({}, [0, 1], way)
    assert nccl_settings.saved_way({}, [0, 1]) == way


#: nvidia-smi's order of two GPUs, by slot; CUDA's has the faster one first.
SMI = "0, GPU-AAAA-1, 1000\n1, GPU-bbbb-2, 2000\n"
#: What a driver may print before it.
WARNED = "WARNING: infoROM is corrupted at gpu 0000:01:00.0\nGPU 0 is hot, slowed down\n"
MIB = 1 << 20


def asked_for_free_memory(
    monkeypatch, uuids: list[str | None], visible: str | None = None, has_context: bool = False
):
    """Free MiB of GPUs that torch numbers in this order; None: a torch without their UUIDs."""

    def properties(index):
        own = {} if uuids[index] is None else {"uuid": uuids[index]}
        return SimpleNamespace(total_memory=100 * MIB, **own)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(measurements.torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(measurements.torch.cuda, "is_initialized", lambda: has_context)
    monkeypatch.setattr(driver_query, "answer", lambda *_: SimpleNamespace(stdout=SMI, returncode=0))
    return [free // MIB for free in measurements.free_memory("cuda", [0, 1])]


@pytest.mark.parametrize(
    "uuids, visible, free",
    [
        (["bbbb-2", "aaaa-1"], None, [2000, 1000]),
        (["GPU-bbbb-2", "GPU-aaaa-1"], None, [2000, 1000]),
        (["bbbb-2", "aaaa-1"], "0,1", [2000, 1000]),
        ([None, None], None, [1000, 2000]),
        ([None, None], "1,GPU-AAAA-1", [2000, 1000]),
        (["cccc-3", "dddd-4"], "1,7", [2000, 90]),
    ],
    ids=["fastest first", "prefix", "visible", "no UUID", "no UUID, visible", "unknown UUID"],
)
def test_free_memory_is_that_of_the_same_card(monkeypatch, uuids, visible, free):
    assert asked_for_free_memory(monkeypatch, uuids, visible) == free


def test_free_memory_is_read_despite_warnings_of_the_driver(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SMI", WARNED + SMI)
    assert asked_for_free_memory(monkeypatch, ["bbbb-2", "aaaa-1"]) == [2000, 1000]


def test_what_this_process_gives_back_is_free(monkeypatch):
    """Of torch's allocator and of ComfyUI's, which the nodes add."""
    monkeypatch.setattr(measurements, "HELD", [lambda index: 100 * MIB, lambda index: index * MIB])
    assert asked_for_free_memory(monkeypatch, ["bbbb-2", "aaaa-1"]) == [2100, 1101]


@pytest.mark.parametrize("hip, left, free", [("", 50, 57), ("", 500, 100), ("7.2", 40, 47), ("7.2", 500, 90)])
def test_memory_of_a_gpu_that_is_the_hosts_is_what_the_host_has_left(monkeypatch, hip, left, free):
    """nvidia-smi says nothing of it, or counts the page cache as taken. HIP's limit on it is not known here.
    The second GPU is one of 100 MiB. Models that leave it stay in its memory, what torch caches does not."""
    monkeypatch.setattr(measurements, "is_unified", lambda index: index == 1)
    monkeypatch.setattr(measurements, "unified_free", lambda: left * MIB)
    monkeypatch.setattr(measurements, "HELD", [lambda index: 45 * MIB * index])
    monkeypatch.setattr(measurements.torch.cuda, "memory_reserved", lambda index: 45 * MIB)
    monkeypatch.setattr(measurements.torch.cuda, "memory_allocated", lambda index: 38 * MIB)
    monkeypatch.setattr(measurements.torch.version, "hip", hip or None)
    assert asked_for_free_memory(monkeypatch, ["bbbb-2", "aaaa-1"], has_context=True) == [2000, free]
    assert [measurements.unified_among("cuda", gpus) for gpus in ([0, 1], [1, 0], [0])] == [(1,), (0,), ()]
    assert measurements.unified_among("cpu", [0, 1]) == ()


def test_the_rate_of_the_last_load_is_cached(monkeypatch, tmp_path):
    """Of all ranks together, the last one's seconds; of a model that was there already nothing is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").write_bytes(b"1")
    model = ModelChoice(str(tmp_path / "model"))
    assert measurements.load_rate(model, "cuda") == 0.0
    for read, rate in ((6_000, 4_000.0), (0, 4_000.0), (60, 40.0)):
        ranks = [{"bytes_read": read, "seconds": seconds} for seconds in (1.0, 3.0)]
        measurements.note_load_rate(model, "cuda", ranks)
        assert measurements.load_rate(model, "cuda") == rate
    (tmp_path / "model").write_bytes(b"another")
    assert measurements.load_rate(model, "cuda") == 0.0


@pytest.mark.parametrize("rate", ["fast", None, [], -1.0, 0.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_not_read(monkeypatch, tmp_path, rate):
    """Of a file that somebody has edited."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = ModelChoice(str(tmp_path / "model"))
    cache_files.write("load", measurements._file_key(model, "cuda"), {"bytes_per_second": rate})
    assert measurements.load_rate(model, "cuda") == 0.0


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """The processes of an nvidia-smi that does not answer, and that SIGKILL does not end: it is in a call of
    a driver that hangs."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 300\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(driver_query, "_paused", {})
    started = []

    class Unkillable(subprocess.Popen):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            started.append(self)

        def kill(self):
            pass

    monkeypatch.setattr(subprocess, "Popen", Unkillable)
    yield started
    for process in started:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def test_a_driver_that_hangs_is_not_waited_for(hanging, monkeypatch):
    """Memory is then what it usually is; nor is it asked again for some minutes."""
    monkeypatch.setattr(measurements, "SMI_SECONDS", 0.2)
    began = time.monotonic()
    assert [measurements._free_bytes_by_driver() for _ in range(2)] == [{}, {}]
    assert len(hanging) == 1 and hanging[0].poll() is None
    driver_query._paused["nvidia-smi"] = time.monotonic()
    assert measurements._free_bytes_by_driver() == {} and len(hanging) == 2
    assert time.monotonic() - began < 120


def test_a_driver_that_is_slow_alone_is_asked_again(hanging, monkeypatch):
    """GPUs without persistence mode take their time, and other programs' memory counts."""
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: os.kill(self.pid, signal.SIGKILL))
    monkeypatch.setattr(measurements, "SMI_SECONDS", 0.2)
    assert [measurements._free_bytes_by_driver() for _ in range(2)] == [{}, {}]
    assert len(hanging) == 2 and all(process.poll() is not None for process in hanging)


def test_nor_by_the_doctor(hanging, monkeypatch):
    monkeypatch.setattr(doctor_facts, "SMI_SECONDS", 0.2)
    began = time.monotonic()
    said = driver_query.driver_says(["nvidia-smi"], 0.2)
    assert said.startswith("nvidia-smi failed: ")
    driver_query._paused.clear()
    assert doctor_facts.Facts().topology.startswith("nvidia-smi failed: ")
    driver_query._paused.clear()
    assert doctor_facts.Facts().smi == ("", doctor_facts.TIMED_OUT)
    assert len(hanging) == 3 and time.monotonic() - began < 120
