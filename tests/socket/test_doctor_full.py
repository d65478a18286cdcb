"""scripts/doctor.py --full on two real ranks: forked ones, as backends of these tests are."""

import json
import signal
import time

import doctor
import doctor_checks
import doctor_degrees
import doctor_families
import doctor_runs
import pytest
from doctor_findings import OK, PROBLEM
from doctor_limits import EXACT

#: The fastest of the families of "methods", all of which tests/ranks has.
FAMILY = "qwen-image"
#: A small one of those with one method.
ONCE = "qwen-image21"
#: Of "methods" those that divide tokens, matrices and blocks; tests/ranks has all.
METHODS = ("ulysses", "tensor parallel", "pipefusion M=2")


@pytest.fixture(autouse=True)
def killed_as_usual(monkeypatch, own_signals):
    """doctor.main handles SIGTERM by SystemExit, which here would be a test that fails, of a pytest that goes
    on though it was told to end."""
    monkeypatch.setattr(doctor, "end_in_order", signal.SIG_DFL)


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


def chosen(ranks):
    return {name: config for name, config in doctor_degrees.methods(ranks).items() if name in METHODS}


def test_ranks_of_the_cpu_have_no_problem(monkeypatch, report):
    """Of the checks that take little: methods in both types, the life of ranks, what they hold."""
    monkeypatch.setattr(doctor_runs, "FAMILIES", (FAMILY,))
    monkeypatch.setattr(doctor_runs, "methods", chosen)
    monkeypatch.setattr(doctor_families, "ONCE", (ONCE,))
    status, found = report("--only", "methods,life,memory", "--minutes", "60")
    problems = [each["text"] for each in found if each["status"] == PROBLEM]
    assert (status, problems) == (0, [])
    of_methods = [each for each in found if each["check"] == "methods"]
    compared = {(each["values"]["method"], each["values"]["family"]) for each in of_methods}
    assert compared == {(name, FAMILY) for name in METHODS} | {("ulysses", ONCE)}
    assert all(each["values"]["fp32"] is not None and each["values"]["bf16"] for each in of_methods)
    exact = [each for each in of_methods if each["values"]["method"] != "pipefusion M=2"]
    assert max(each["values"]["fp32"] for each in exact) <= EXACT["cpu"]
    of_life = {each["values"]["life"]: each["status"] for each in found if each["check"] == "life"}
    assert of_life.pop("parking") and set(of_life.values()) == {OK}  # ranks of the CPU park nothing
    assert set(of_life) == {"cancel", "two models", "a killed rank"}
    held = {each["values"]["method"]: each["values"] for each in found if each["check"] == "memory"}
    assert len(held) == 4 and all(len(each["held"]) == len(each["planned"]) == 2 for each in held.values())
