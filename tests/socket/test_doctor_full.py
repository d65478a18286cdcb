"""scripts/doctor.py --full on two real ranks: forked ones, as backends of these tests are."""

import json
import signal
import time

import doctor
import doctor_checks
import doctor_degrees
import doctor_runs
import pytest
from doctor_findings import OK, PROBLEM
from doctor_limits import EXACT

#: The fastest of the families of "methods", all of which tests/ranks has.
FAMILY = "qwen-image"


@pytest.fixture(autouse=True)
def own_signals():
    """doctor.main handles signals of its process, which here is pytest's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def report(monkeypatch, tmp_path):
    """report(option, ...) -> exit status and findings of --full on the CPU, without those of this machine."""
    monkeypatch.setattr(doctor_checks, "CHECKS", {})

    def run(*options):
        monkeypatch.setattr(doctor, "BEGAN", time.monotonic())
        out = tmp_path / "doctor.json"
        status = doctor.main(["--full", "--device", "cpu", "--json", str(out), *options])
        return status, json.loads(out.read_text())["findings"]

    return run


@pytest.mark.full
def test_ranks_of_the_cpu_have_no_problem(monkeypatch, report):
    """Of the checks that take little: each method in both types, the life of ranks, what they hold."""
    monkeypatch.setattr(doctor_runs, "FAMILIES", (FAMILY,))
    status, found = report("--only", "methods,life,memory", "--minutes", "60")
    problems = [each["text"] for each in found if each["status"] == PROBLEM]
    assert (status, problems) == (0, [])
    of_methods = [each for each in found if each["check"] == "methods"]
    compared = {(each["values"]["method"], each["values"]["family"]) for each in of_methods}
    assert compared == {(name, FAMILY) for name in doctor_degrees.methods(2)}
    assert all(each["values"]["fp32"] is not None and each["values"]["bf16"] for each in of_methods)
    exact = [
        each for each in of_methods if each["values"]["method"] in ("ulysses", "ring", "tensor parallel")
    ]
    assert max(each["values"]["fp32"] for each in exact) <= EXACT["cpu"]
    of_life = {each["values"]["life"]: each["status"] for each in found if each["check"] == "life"}
    assert of_life.pop("parking") and set(of_life.values()) == {OK}  # ranks of the CPU park nothing
    assert set(of_life) == {"cancel", "two models", "a killed rank"}
    held = {each["values"]["method"]: each["values"] for each in found if each["check"] == "memory"}
    assert len(held) == 4 and all(len(each["held"]) == len(each["planned"]) == 2 for each in held.values())
