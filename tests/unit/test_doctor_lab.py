"""The ranks and processes of scripts/doctor.py --full, on stand-ins for GPUs."""

import os

import doctor_lab
import doctor_runs
import pytest
from doctor_checks import PROBLEM
from doctor_facts import Facts

from backend.client import measurements
from backend.client.rank_environment import sanitized_environment
from backend.config import ParallelConfig
from backend.protocol import Loaded, Sample


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
            """Return None, as after should_cancel."""

    for name in doctor_lab.PLAIN_FLOAT32:
        monkeypatch.setenv(name, "0")
    lab = doctor_lab.Lab("cuda", 2, 10.0)
    monkeypatch.setattr(lab, "backend", lambda config: Hanging())
    yield lab
    lab.close()


def test_a_hang_is_said_with_its_remedy_though_the_minutes_are_over(gpus, tmp_path):
    gpus._until = lambda seconds: lambda: None
    gpus.end = 0.0
    with pytest.raises(TimeoutError) as hang:
        gpus.run(ParallelConfig(ulysses_degree=2), tmp_path, Sample("", "euler", 1.0, 0))
    assert "the ranks hang; links are to blame only where the check links fails" in str(hang.value)
    assert "NCCL_P2P_DISABLE" not in str(hang.value)


def test_links_that_hang_are_no_circle_back_to_the_doctor(monkeypatch, gpus, tmp_path):
    """They are the cause of what hangs after them."""
    asked = []

    def hang(device, indices, check, show, longest):
        asked.append(longest)
        raise measurements.UnmeasuredError("no answer", measurements.hang_remedy(device))

    monkeypatch.setattr(measurements, "machine_rates", hang)
    (found,) = doctor_runs.links(gpus)
    assert found.status == PROBLEM and "NCCL_P2P_DISABLE=1" in found.text and "doctor.py" not in found.text
    assert asked[0] < measurements.LONGEST_SECONDS
    gpus._until = lambda seconds: lambda: None
    with pytest.raises(TimeoutError, match="the ranks hang.*NCCL_P2P_DISABLE=1.*BIOS"):
        gpus.run(ParallelConfig(ulysses_degree=2), tmp_path, Sample("", "euler", 1.0, 0))
