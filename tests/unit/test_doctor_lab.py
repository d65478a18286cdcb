"""The ranks and processes of scripts/doctor.py --full, on stand-ins for GPUs."""

import os

import doctor_lab
from doctor_facts import Facts

from backend.client.rank_environment import sanitized_environment
from backend.config import ParallelConfig


def test_ranks_on_gpus_compute_float32_without_tf32(monkeypatch):
    """Whatever a container has set, which the quick checks list."""
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        monkeypatch.setenv(name, "1")
    assert set(Facts().variables) >= set(doctor_lab.PLAIN_FLOAT32)
    doctor_lab.Lab("cuda", 2, 1.0).close()
    environment = sanitized_environment(dict(os.environ), ParallelConfig(ulysses_degree=2), "cuda")
    assert environment.items() >= doctor_lab.PLAIN_FLOAT32.items()
    assert set(doctor_lab.PLAIN_FLOAT32.values()) == {"0"}
