"""The ranks and processes of scripts/doctor.py --full, on stand-ins for GPUs."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import doctor_hangs
import doctor_lab
import doctor_links
import doctor_runs
import doctor_time
import pytest
import torch
from doctor_facts import Facts
from doctor_findings import PROBLEM, WARNING, OutOfTime, findings
from doctor_stubs import Time

from backend.client.auto import measurements, probe_process
from backend.client.launching import nccl_settings, private_folder
from backend.client.launching.rank_environment import sanitized_environment
from backend.config import ParallelConfig
from backend.loading.files.safetensors_files import TensorFiles
from backend.loading.quantized import QuantizedFiles
from backend.planner.machine import Machine
from backend.protocol import BackendError, Loaded, Result, Sample


def test_ranks_on_gpus_compute_float32_without_tf32(monkeypatch):
    """Whatever a container has set, which the quick checks list."""
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        monkeypatch.setenv(name, "1")
    assert set(Facts().variables) >= set(doctor_lab.PLAIN_FLOAT32)
    doctor_lab.Lab("cuda", 2, 1.0).close()
    environment = sanitized_environment(dict(os.environ), ParallelConfig(ulysses_degree=2), "cuda")
    assert environment.items() >= doctor_lab.PLAIN_FLOAT32.items()
    assert set(doctor_lab.PLAIN_FLOAT32.values()) == {"0"}


@pytest.fixture
def gpus(monkeypatch):
    """A lab of two GPUs whose ranks hang."""

    class Hanging:
        def load(self, *args, **named):
            return Loaded("tiny", "flux")

        def sample(self, message, **named):
            """Return None, as after should_cancel, when the minutes are over."""
            lab.end = 0.0

    for name in doctor_lab.PLAIN_FLOAT32:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(doctor_time, "HANG_SECONDS", 0.0)
    lab = doctor_lab.Lab("cuda", 2, 10.0)
    monkeypatch.setattr(lab, "backend", lambda config: Hanging())
    yield lab
    lab.close()


def test_a_hang_is_said_with_its_remedy_though_the_minutes_are_over(gpus, tmp_path):
    gpus._until = lambda *_: lambda: None
    with pytest.raises(TimeoutError) as hang:
        gpus.run(ParallelConfig(ulysses_degree=2), tmp_path, Sample("", "euler", 1.0, 0))
    assert "the ranks hang; links are to blame only where the check links fails" in str(hang.value)
    assert "IOMMU" not in str(hang.value)
    gpus.end = time.monotonic() + 60
    with pytest.raises(OutOfTime, match="hung before"):  # with whatever model
        gpus.run(ParallelConfig(ulysses_degree=2), tmp_path, Sample("", "euler", 1.0, 0))


def test_ranks_that_hang_are_ended_without_a_cancel(monkeypatch, tmp_path):
    """They do not receive it, and it is waited for."""

    class Process:
        log = tmp_path / "backend.log"
        watch = SimpleNamespace(steps_of_ranks=lambda done: "rank 0 in step 1")

        def dump_stacks(self):
            self.log.write_text("Current thread ...\n")

    class Hanging:
        closed, process = False, Process()

        def load(self, *args, **named):
            return Loaded("tiny", "flux")

        def sample(self, message, should_cancel):
            assert should_cancel()
            raise BackendError("The connection is closed")

        def close(self):
            self.closed = True

    monkeypatch.setattr(doctor_lab, "RUN_SECONDS", 0.0)
    lab, ranks = doctor_lab.Lab("cpu", 2, 10.0), Hanging()
    monkeypatch.setattr(lab, "backend", lambda config: ranks)
    monkeypatch.setattr(lab, "_until", lambda *_: lambda: None)
    monkeypatch.setattr(doctor_hangs, "WRITE_SECONDS", 0.0)

    def runs(lab):
        lab.run(ParallelConfig(), tmp_path, Sample("", "euler", 1.0, 0))

    (found,) = findings("methods", runs, lab)
    assert "the ranks hang" in found.text and ranks.closed
    assert found.values["log"] == "Current thread ...\n" and found.values["steps"] == "rank 0 in step 1"
    lab.close()


def test_a_slow_compiler_is_no_hang(monkeypatch, tmp_path):
    late = []

    class Ranks:
        closed, process = True, None

        def load(self, *args, **named):
            return Loaded("tiny", "flux")

        def sample(self, message, should_cancel):
            late.append(should_cancel())
            return Result(tensors={"samples": torch.ones(1)})

    monkeypatch.setattr(doctor_lab, "RUN_SECONDS", 0.0)
    lab = doctor_lab.Lab("cpu", 2, 10.0)
    monkeypatch.setattr(lab, "backend", lambda config: Ranks())
    monkeypatch.setattr(lab, "_until", lambda *_: lambda: None)
    for compile in ("off", "blocks", "blocks"):
        lab.run(ParallelConfig(compile=compile), tmp_path, Sample("", "euler", 1.0, 0))
    assert late == [True, False, True]  # its first request alone compiles
    lab.close()


def test_benchmarks_run_in_the_environment_of_ranks(monkeypatch, tmp_path, gpus):
    """With the way between GPUs that was found, and without what only ComfyUI is to have."""
    for name in nccl_settings.LINK_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    way = {"NCCL_P2P_DISABLE": "1"}
    nccl_settings.save_way(os.environ, [0, 1], way)
    monkeypatch.setattr(doctor_lab.doctor_processes, "run", lambda command, seconds, folder, env: env)
    environment = gpus._benchmark("waits.py", 1.0)
    assert environment.items() >= way.items() and "CUDA_LAUNCH_BLOCKING" not in environment


def test_fp8_of_the_doctor_has_a_native_product(monkeypatch):
    """Layers with scales of rows have none, and one of them refuses the whole file."""
    lab = doctor_lab.Lab("cpu", 2, 10.0)
    files = QuantizedFiles(TensorFiles([lab.quantized("float8_e4m3fn")]))
    scales = [shape for key, shape in files.files.shapes.items() if key.endswith("weight_scale")]
    assert scales and set(scales) <= {(), (1,)}
    lab.close()


def test_a_gguf_file_takes_no_more_memory_than_its_weights(monkeypatch):
    """Its values in float32 would be 4.9 GB of a GPU's file; and each file asks for room first."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(gguf.quants, "dequantize", None)
    lab, asked = doctor_lab.Lab("cpu", 2, 1.0), []
    monkeypatch.setattr(lab, "need_room", lambda size, what, held=0: asked.append(size))
    for kind in ("bf16", "Q8_0", "Q4_K"):
        assert lab.quantized(kind).stat().st_size
    assert len(asked) == 3 and ("weights",) in lab._cache
    lab.forget_weights()
    assert ("weights",) not in lab._cache
    lab.close()


def test_links_that_hang_are_no_circle_back_to_the_doctor(monkeypatch, gpus, tmp_path):
    """They are the cause of what hangs after them."""
    asked = []

    def hang(device, indices, check, show, longest):
        asked.append(longest)
        error = probe_process.UnmeasuredError("no answer", probe_process.hang_remedy(device), True)
        error.log = "NCCL WARN connect failed"
        raise error

    monkeypatch.setattr(doctor_links, "FAILED", [])
    monkeypatch.setattr(doctor_links, "driver_says", lambda *_: "GPU 1 ERR!")
    monkeypatch.setattr(measurements, "machine_rates", hang)
    (found,) = doctor_runs.links(gpus)
    assert found.status == PROBLEM and "IOMMU" in found.text and "doctor.py" not in found.text
    assert found.values == {"log": "NCCL WARN connect failed", "nvidia-smi": "GPU 1 ERR!"}
    assert asked[0] < probe_process.MAX_SECONDS
    gpus._until = lambda *_: lambda: None
    with pytest.raises(TimeoutError, match="the ranks hang.*IOMMU.*BIOS"):
        gpus.run(ParallelConfig(ulysses_degree=2), tmp_path, Sample("", "euler", 1.0, 0))


@pytest.mark.parametrize("way", [{}, {"NCCL_P2P_LEVEL": "NVL"}])
def test_ranks_that_start_later_take_the_way_that_was_found(monkeypatch, tmp_path, gpus, way):
    """Those of the doctor's other checks and ComfyUI's; a way of better or worse days is forgotten."""
    for name in nccl_settings.LINK_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nccl_settings.save_way(os.environ, [0, 1], {"NCCL_P2P_DISABLE": "1"})
    rates = Machine(
        "GPU", 1e14, 1e14, 1e12, 1e10, {2: 1e10}, links="They send through the host." if way else ""
    )

    def measure(device, indices, *_, **__):
        assert nccl_settings.saved_way(os.environ, indices) == {}  # measured anew
        nccl_settings.save_way(os.environ, indices, way)
        return rates

    monkeypatch.setattr(measurements, "machine_rates", measure)
    found = list(doctor_runs.links(gpus))
    environment = sanitized_environment(dict(os.environ), ParallelConfig(ulysses_degree=2), "cuda")
    assert {name: environment[name] for name in environment if name.startswith("NCCL_P2P")} == way
    told = [each.text for each in found if each.status == WARNING]
    assert bool(told) == bool(way) and all("through the host" in text and "IOMMU" in text for text in told)


def test_links_of_ranks_that_still_import_are_measured_by_another_run(monkeypatch, gpus):
    """In a terminal nothing is queued."""

    def slow(*_, **__):
        raise probe_process.UnmeasuredError("no answer", probe_process.SLOW_START)

    monkeypatch.setattr(measurements, "machine_rates", slow)
    (found,) = doctor_runs.links(gpus)
    assert "run it again" in found.text and "queue" not in found.text and not gpus.links_failed


@pytest.mark.parametrize(
    "line, spent, status, says",
    [
        ("starting 2 ranks, 70 s: 1 of 2 ready", 70, None, ""),
        (
            "starting 2 ranks, 151 s: 1 of 2 ready",
            151,
            PROBLEM,
            "start within 151 s (1 of 2 ready); some",
        ),
        ("starting 2 ranks, 151 s", 151, PROBLEM, "start within 151 s (none ready); some"),
        ("starting 2 ranks, 151 s: 2 of 2 ready", 151, PROBLEM, "start within 151 s"),
        (None, 151, PROBLEM, "load within 151 s"),
    ],
    ids=["slow", "some", "none", "hang", "load"],
)
def test_a_slow_start_is_no_hang(monkeypatch, line, spent, status, says):
    """As of packages on a network disk; its degrees are started again. Ranks that are all ready, and do not
    start, wait for each other."""
    clock = Time()
    monkeypatch.setattr(doctor_lab.time, "monotonic", clock.monotonic)
    lab = doctor_lab.Lab("cpu", 2, 60.0)
    config = ParallelConfig(ulysses_degree=2)
    check = lab._until(config, None if line is None else [line])
    clock.seconds += spent
    found = list(findings("methods", lambda: check() or []))
    assert [each.status for each in found] == ([status] if status else [])
    assert not found or says in found[0].text
    assert lab.hung.has(config) == (says.endswith(f"{spent} s"))
    lab.close()


@pytest.mark.parametrize("ready, status", [(1, WARNING), (2, PROBLEM)])
def test_a_start_that_its_time_ends_is_no_hang(monkeypatch, ready, status):
    clock = Time()
    monkeypatch.setattr(doctor_lab.time, "monotonic", clock.monotonic)
    lab = doctor_lab.Lab("cpu", 2, 2.0)
    config = ParallelConfig(ulysses_degree=2)
    check = lab._until(config, [f"starting 2 ranks, 121 s: {ready} of 2 ready"])
    clock.seconds += 121
    (found,) = findings("methods", check)
    assert found.status == status and ("when the time was over" in found.text) == (status == WARNING)
    lab.close()


def test_a_doctor_of_the_cpu_leaves_the_way_between_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nccl_settings.save_way(os.environ, [0, 1], {"NCCL_P2P_DISABLE": "1"})
    monkeypatch.setattr(measurements, "machine_rates", lambda *_, **__: None)
    lab = doctor_lab.Lab("cpu", 2, 1.0)
    lab.machine()
    lab.close()
    assert nccl_settings.saved_way(os.environ, [0, 1]) == {"NCCL_P2P_DISABLE": "1"}


#: A doctor with a file, which waits for its death.
DOCTOR = """
import time
from doctor_lab import Lab
lab = Lab("cpu", 2, 1.0)
(lab.folder / "model.safetensors").touch()
print(lab.folder, flush=True)
time.sleep(600)
"""


def test_files_of_a_doctor_that_was_killed_go_with_the_next_launch(tmp_path):
    """Gigabytes stayed in /tmp; and a long TMPDIR, too long for sockets, is taken for files."""
    place = tmp_path / ("long" * 25)
    place.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(place)}
    command = [sys.executable, "-c", DOCTOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None, "a pipe"
        folder = Path(process.stdout.readline().strip())
        private_folder.sweep(place)
        stays = (folder / "model.safetensors").exists()
        process.kill()
    assert stays and folder.parent == place
    private_folder.sweep(place)
    assert not list(place.iterdir())


def test_launches_are_timed_and_told(monkeypatch):
    """Not the backend that is there already."""

    def backend_for(config, check, show):
        if config.world_size not in launched:
            launched.append(config.world_size)
            show("starting")
        return None

    launched: list[int] = []
    monkeypatch.setattr(doctor_lab.pool, "backend_for", backend_for)
    lab = doctor_lab.Lab("cpu", 2, 1.0)
    for ranks in (1, 2, 2):
        lab.backend(ParallelConfig(ulysses_degree=ranks))
    assert [each["ranks"] for each in lab.starts] == [1, 2]
    lab.starts = [{"ranks": 2, "seconds": seconds} for seconds in (5.04, 4.0)]
    *_, last = doctor_runs._in_order(lab, [])
    assert last.text == "ranks started 2 times: 2 in 4.0 to 5.0 s" and last.values["starts"] == lab.starts
    lab.close()


def test_files_go_though_ranks_do_not_end(monkeypatch):
    """Gigabytes, and Ctrl-C may come while they end."""

    def close_all():
        raise KeyboardInterrupt

    lab = doctor_lab.Lab("cpu", 2, 1.0)
    monkeypatch.setattr(doctor_lab.pool, "close_all", close_all)
    with pytest.raises(KeyboardInterrupt):
        lab.close()
    assert not lab.folder.exists()
