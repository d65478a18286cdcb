"""What is measured for the planner: by which process, and for which GPUs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import interpreters
import pytest

from backend.client import measurements
from backend.client.dependencies import require_dependencies
from backend.config import ParallelConfig
from backend.protocol import BackendError


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


@pytest.mark.parametrize("name", ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_LEVEL"])
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
        measurements._kept("machine", measurements._machine_key("cpu", [0]), measure, dict)
    assert measured == [None, "1", "0"]


def test_a_machine_that_cannot_be_measured_is_sent_to_the_doctor():
    """In one sentence: what, why, and what to do about it, the diagnosis first."""
    command = [sys.executable, "-c", "raise ValueError('no link')"]
    with pytest.raises(BackendError) as failure:
        measurements._run(command, ParallelConfig(), "cpu", lambda: None)
    sentence = str(failure.value)
    assert "(ValueError: no link); run python scripts/doctor.py" in sentence
    assert sentence.index("doctor.py") < sentence.index("by hand") and sentence.count(". ") == 0


@pytest.mark.parametrize("device, says", [("cuda", "NCCL_P2P_DISABLE=1"), ("cpu", "scripts/doctor.py")])
def test_ranks_that_do_not_answer_are_said_to_hang(device, says):
    """In one sentence; the doctor, whose probe it is, too, would send to itself."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(measurements.UnmeasuredError) as failure:
        measurements._run(command, ParallelConfig(), device, lambda: None, longest=1.0)
    sentence = str(failure.value)
    assert "did not answer within 1 s" in sentence and says in sentence and sentence.count(". ") == 0
    assert (failure.value.remedy == "") == (device == "cpu") and "by hand" in sentence


#: A probe whose ranks hang, and a process like ComfyUI's, that measures on a thread and ends meanwhile.
HANGING = """
import os, sys, time
from backend import probe
def hang(*arguments):
    with open(sys.argv[sys.argv.index("--out") + 1], "w") as out:
        out.write(str(os.getpid()))
    time.sleep(600)
probe.Probe = hang
probe.mesh.file_store = str
probe.main()
"""
ENDING = """
import sys, threading, time
from pathlib import Path
from backend.client import measurements
from backend.config import ParallelConfig
command = [sys.executable, "-c", {code!r}, "--store", "x", "--device", "cpu", "--out", {out!r}]
run = lambda: measurements._run(command, ParallelConfig(), "cpu", lambda: None)
threading.Thread(target=run, daemon=True).start()
while not (Path({out!r}).exists() and Path({out!r}).read_text()):
    time.sleep(0.05)
"""


def test_a_probe_that_hangs_ends_with_who_measures(tmp_path):
    """A daemon thread, as ComfyUI's worker is, runs no ``finally`` when its process ends."""
    out = tmp_path / "pid"
    ends = [sys.executable, "-c", ENDING.format(code=HANGING, out=str(out))]
    subprocess.run(ends, cwd=measurements.PACK, check=True, timeout=300)
    pid = int(out.read_text())
    try:
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, "the probe outlives who started it"
            time.sleep(0.05)
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def test_an_agent_that_does_not_end_is_killed(monkeypatch):
    """Its ranks have seen the end of their pipe by then."""
    monkeypatch.setattr(measurements, "END_SECONDS", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with pytest.raises(measurements.UnmeasuredError, match="did not answer within 1 s"):
        measurements._run([sys.executable, "-c", code], ParallelConfig(), "cpu", lambda: None, longest=1.0)


#: nvidia-smi's order of two GPUs, by slot; CUDA's has the faster one first.
SMI = "0, GPU-AAAA-1, 1000\n1, GPU-bbbb-2, 2000\n"
#: What a driver may print before it.
WARNED = "WARNING: infoROM is corrupted at gpu 0000:01:00.0\nGPU 0 is hot, slowed down\n"
MIB = 1 << 20


def asked_for_free_memory(monkeypatch, uuids: list[str | None], visible: str | None = None):
    """Free MiB of GPUs that torch numbers in this order; None: a torch without their UUIDs."""

    def properties(index):
        own = {} if uuids[index] is None else {"uuid": uuids[index]}
        return SimpleNamespace(total_memory=100 * MIB, **own)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(measurements.torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(measurements.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(measurements.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=SMI))
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


def test_free_memory_is_read_beside_warnings_of_the_driver(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SMI", WARNED + SMI)
    assert asked_for_free_memory(monkeypatch, ["bbbb-2", "aaaa-1"]) == [2000, 1000]


def test_what_this_process_gives_back_is_free(monkeypatch):
    """Of torch's allocator and of ComfyUI's, which the nodes add."""
    monkeypatch.setattr(measurements, "HELD", [lambda index: 100 * MIB, lambda index: index * MIB])
    assert asked_for_free_memory(monkeypatch, ["bbbb-2", "aaaa-1"]) == [2100, 1101]


def test_the_rate_of_the_last_load_is_kept(monkeypatch, tmp_path):
    """Of all ranks together, the last one's seconds; of a model that was there already nothing is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").write_bytes(b"1")
    model = (str(tmp_path / "model"), "default", "auto")
    assert measurements.load_rate(model, "cuda") == 0.0
    for read, rate in ((6_000, 4_000.0), (0, 4_000.0), (60, 40.0)):
        ranks = [{"bytes_read": read, "seconds": seconds} for seconds in (1.0, 3.0)]
        measurements.remember_load(model, "cuda", ranks)
        assert measurements.load_rate(model, "cuda") == rate
    (tmp_path / "model").write_bytes(b"another")
    assert measurements.load_rate(model, "cuda") == 0.0
