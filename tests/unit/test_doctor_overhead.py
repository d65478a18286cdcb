"""What scripts/doctor.py --full says of the engine's overhead on one rank."""

import math

import doctor_lab
import doctor_next
import doctor_overhead
import pytest
from benchmarked import save_model
from doctor_findings import OK, PROBLEM, WARNING
from doctor_processes import Ended
from doctor_stubs import ENDED, StubLab


class Lab(StubLab):
    """One rank whose rounds gave these numbers."""

    def __init__(self, ended=ENDED, **numbers):
        super().__init__()
        self.ended, self.changes = ended, numbers

    def overhead(self, model, has_compiled, rounds):
        if self.ended.code != 0:
            return {}, self.ended
        return super().overhead(model, has_compiled, rounds)[0] | self.changes, self.ended


def spread(median):
    return {"median": median, "low": median - 0.01, "high": median + 0.01}


@pytest.mark.parametrize(
    "numbers, status",
    [
        ({}, OK),
        ({"ratio": spread(1.021)}, WARNING),
        ({"difference": 1e-3}, PROBLEM),
        ({"difference": math.nan}, PROBLEM),
    ],
)
@pytest.mark.parametrize("check", [doctor_overhead.overhead, doctor_overhead.overhead_compiled])
def test_the_engine_is_judged_by_its_goal_and_its_latent(check, numbers, status):
    (found,) = check(Lab(**numbers))
    assert found.status == status and "(goal 1.02)" in found.text
    assert found.values["seconds"] == pytest.approx(2.02 / 4)  # the median of ours, in four steps
    assert f"{found.values['ratio']['median']:.3f} (" in found.text


def test_what_fails_eagerly_is_a_problem_and_what_does_not_compile_none():
    failed = Ended(1, 9.0, "Traceback\ntorch._inductor.exc.InductorError: no C++ compiler\n")
    (eager,) = doctor_overhead.overhead(Lab(failed))
    (compiled,) = doctor_overhead.overhead_compiled(Lab(failed))
    assert (eager.status, compiled.status) == (PROBLEM, WARNING)
    assert all("no C++ compiler" in each.text for each in (eager, compiled))


@pytest.mark.parametrize(
    "ended",
    [
        Ended(-11, 9.0, "torch._inductor.exc.InductorError: which was caught\n"),
        Ended(1, 9.0, "Traceback\nRuntimeError: CUDA error: an illegal memory access was encountered\n"),
    ],
)
def test_what_no_compiler_raises_is_a_problem_with_compiled_blocks_too(ended):
    (found,) = doctor_overhead.overhead_compiled(Lab(ended))
    assert found.status == PROBLEM and doctor_next.NOTHING not in found.text


@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError: CUDA out of memory.",
        "torch.AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes",
        "MemoryError",
    ],
)
@pytest.mark.parametrize("device, words", [("cpu", "this device has"), ("cuda", "this GPU has")])
def test_a_full_device_is_named(error, device, words):
    lab = Lab(Ended(1, 9.0, f"Traceback\n{error}\n"))
    lab.device = device
    for check in (doctor_overhead.overhead, doctor_overhead.overhead_compiled):
        (found,) = check(lab)
        assert found.status == WARNING and f"{words} no room for two" in found.text


def test_a_lab_measures_it(monkeypatch, tmp_path):
    """By benchmarks/peers.py, on one rank of this machine."""
    monkeypatch.setattr(doctor_overhead, "ROUNDS", 1)
    lab = doctor_lab.Lab("cpu", 1, 10.0)
    monkeypatch.setattr(lab, "flux", lambda: save_model(tmp_path / "model"))
    (found,) = doctor_overhead.overhead(lab)
    lab.close()
    assert found.status in (OK, WARNING) and found.values["difference"] < 1e-5, found
    assert found.values["over"] == "diffusers" and found.values["seconds"] > 0
