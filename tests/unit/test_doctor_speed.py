"""What scripts/doctor.py --full compares of what it times."""

import math

import doctor_lab
import doctor_memory
import doctor_runs
import doctor_speed
import doctor_steps
import pytest
import torch
from doctor_findings import OK, PROBLEM
from doctor_stubs import StubLab

from backend.config import ParallelConfig

METHODS = {
    "exact": ParallelConfig(ulysses_degree=2),
    "stale": ParallelConfig(pipefusion_degree=2, num_pipeline_patch=2),
    "fp8": ParallelConfig(ring_degree=2, wire="fp8"),
}


class TimedLab(StubLab):
    """Ranks that are twice as fast in steady state, and whose latents are off."""

    def __init__(self, device, off):
        super().__init__()
        self.device, self.off = device, off

    def step_seconds(self, config, path, request, steps=None):
        if config.world_size == 1:
            return 1.0, doctor_lab.Run(torch.ones(4), 3.0, timed=[4.0, 3.0, 6.0, 7.0])
        return 0.5, doctor_lab.Run(torch.ones(4) * (1 + self.off), 2.5, timed=[2.5, 3.0, 4.0, 4.5])


CASES = [
    ("exact", "cpu", 1e-6, OK),
    ("exact", "cpu", 1e-3, PROBLEM),
    ("exact", "cuda", 1e-3, OK),
    ("exact", "cuda", 1e-1, PROBLEM),
    ("exact", "cuda", math.nan, PROBLEM),
    ("stale", "cuda", 1e-1, OK),
    ("stale", "cuda", math.nan, PROBLEM),
    ("fp8", "cpu", 5e-2, OK),
    ("fp8", "cuda", 0.5, PROBLEM),
]


@pytest.mark.parametrize("method, device, off, status", CASES)
def test_what_is_timed_is_compared_with_one_rank(method, device, off, status):
    lab, config = TimedLab(device, off), METHODS[method]
    speed = doctor_speed._speed(lab, method, config, 1.8)
    one = {"bf16": lab.step_seconds(ParallelConfig(), None, None)}
    shape = doctor_steps._shape(lab, method, config, "bf16", lab.flux(), lab.request, "tiny", one)
    for found in (speed, shape):
        assert found.status == status, found.text
        assert found.values["distance"] == (pytest.approx(off, rel=0.1) if off == off else math.inf)


def test_whole_requests_are_reported_next_to_the_steady_state():
    """PipeFusion's warm-up, fill and drain are in them."""
    lab = TimedLab("cpu", 0.0)
    found = doctor_speed._speed(lab, "pipefusion M=2", METHODS["stale"], 1.8)
    assert "(whole requests of 2 steps 1.20 times, of 5 steps 1.50 times)" in found.text
    assert found.values["whole_requests"] == {"2": 1.2, "5": 1.5}


def test_fsdp_is_timed_and_measured(monkeypatch):
    lab, measured = TimedLab("cpu", 0.0), []
    monkeypatch.setattr(
        doctor_memory, "_memory", lambda lab, name, config: measured.append(config.shard_weights) or []
    )
    timed = [found.values["method"] for found in doctor_speed.speed(lab)]
    assert "FSDP" in timed
    list(doctor_memory.memory(lab))
    assert measured == [False, False, False, True]  # tensor parallelism before it


def test_hybrids_of_pipefusion_run_with_several_patches_too(monkeypatch):
    """Of one family, since stale keys and values tell little."""
    found = doctor_runs.methods(4)
    pairs = {name for name in found if " x " in name and "pp 2" in name}
    assert {name for name in pairs if found[name].has_stale_kv} == {
        f"{name} M=2" for name in pairs if not found[name].has_stale_kv
    }
    lab, ran = StubLab(), []
    lab.ranks = 4
    monkeypatch.setattr(doctor_runs, "reference", lambda *_: None)
    monkeypatch.setattr(
        doctor_runs, "_method", lambda lab, name, config, family, halves: ran.append((name, family)) or []
    )
    list(doctor_runs.all_methods(lab))
    assert [family for name, family in ran if name == "cfg 2 x pp 2 M=2"] == ["flux-dev"]
    assert len([name for name, _ in ran if name == "cfg 2 x pp 2"]) == len(doctor_runs.FAMILIES)
