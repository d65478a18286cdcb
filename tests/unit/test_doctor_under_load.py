"""What scripts/doctor.py says of GPUs while they work, of an nvidia-smi that is not here."""

import time

import doctor_copies
import doctor_speed
import doctor_under_load
import pytest
from doctor_copies import Copies
from doctor_findings import OK, WARNING
from doctor_next import advised
from doctor_stubs import StubLab, machine
from doctor_under_load import FIELDS, UnderLoad, judged, of_gpus

#: As idle, at work, and after it.
LINES = (
    "0, GPU-1a, 1, 4, 16, 210, 2520, 21.3, 34, 0x0000000000000001",
    "0, GPU-1a, 4, 4, 16, 2490, 2520, 441.0, 71, 0x0000000000000004",
    "0, GPU-1a, 4, 4, 16, 1200, 2520, 80.0, 70, 0x0000000000000001",
)


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """Put a program on the PATH that says one line after another, the last one again and again."""

    def write(lines, refused=""):
        counter = tmp_path / "asked"
        counter.write_text("")
        program = tmp_path / "nvidia-smi"
        said = "\n".join(f"{index}) echo '{line}';;" for index, line in enumerate(lines[:-1]))
        program.write_text(
            f'#!/bin/sh\ncase "$*" in *{refused or "nothing"}*) exit 2;; esac\n'
            f"asked=$(wc -c < {counter}); printf x >> {counter}\n"
            f"case $asked in\n{said}\n*) echo '{lines[-1]}';;\nesac\n"
        )
        program.chmod(0o755)
        return counter

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor_under_load, "INTERVAL_SECONDS", 0.01)
    return write


def watched(counter, times):
    """Return what is seen while nvidia-smi is asked so many times."""
    deadline = time.monotonic() + 60
    with UnderLoad() as seen:
        while len(counter.read_text()) < times and time.monotonic() < deadline:
            time.sleep(0.01)
    return seen.rows


@pytest.mark.parametrize("refused", ["", "clocks_event_reasons"], ids=["", "a driver before 2023"])
def test_a_gpu_is_told_as_it_works_most(smi, refused):
    (row,) = watched(smi(LINES, refused), 4)
    assert row == dict(zip(FIELDS, LINES[1].split(", ")))


def test_an_nvidia_smi_that_says_nothing_is_no_fault(smi, monkeypatch):
    smi(LINES, "--query-gpu")
    with UnderLoad() as seen:
        seen._thread.join(60)
    assert seen.rows == [] == judged([]) and not seen._thread.is_alive()
    monkeypatch.setenv("PATH", "")
    with UnderLoad() as seen:
        seen._thread.join(60)
    assert seen.rows == []


@pytest.mark.parametrize(
    "changes, status, says",
    [
        ({}, OK, "GPU 0 PCIe 4 of 4, 2490 of 2520 MHz, 441.0 W, 71 C"),
        ({"pcie.link.gen.current": "3"}, WARNING, "the link of GPU 0 is slower than it could be"),
        ({FIELDS[-1]: "0x0000000000000024"}, WARNING, "GPU 0 is slowed down by heat"),
        ({FIELDS[-1]: "0x0000000000000088"}, WARNING, "by its hardware and its power supply"),
        ({FIELDS[-1]: "[N/A]", "pcie.link.gen.current": "[N/A]"}, OK, "PCIe [N/A] of 4"),
    ],
)
def test_what_slows_a_gpu_down_is_said(changes, status, says):
    """Its power limit alone is usual."""
    (found,) = judged([dict(zip(FIELDS, LINES[1].split(", "))) | changes])
    assert found.status == status and says in found.text
    assert advised(found).text == found.text


def test_gpus_that_do_not_compute_are_not_judged(smi):
    """Their links are those of idle ones; and torch numbers the fastest GPU first, nvidia-smi a slot."""
    idle, busy = (line.split(",", 2)[2] for line in LINES[:2])
    lines = [f"{index}, GPU-{index}A,{rest}" for index, rest in enumerate((idle, busy, busy, idle))]
    rows = watched(smi(["\n".join(lines)]), 2)
    (found,) = judged(of_gpus(rows, {0: "2a", 1: "1a"}))
    assert found.status == OK and "GPU 0 PCIe 4" in found.text and "GPU 1 PCIe 4" in found.text
    assert [row["uuid"] for row in found.values["under_load"]] == ["GPU-2A", "GPU-1A"]
    for unknown in ({0: "mig-2a"}, {0: ""}):
        assert of_gpus(rows, unknown) == rows


def test_gpus_are_asked_while_all_compute_and_while_they_copy(smi, monkeypatch):
    counter = smi(LINES[1:2])

    def work(*_, **how):
        before = len(counter.read_text())
        deadline = time.monotonic() + 60
        while len(counter.read_text()) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.01)

    lab = StubLab()
    lab.device = "cuda"
    monkeypatch.setattr(lab, "run", work)
    (found,) = doctor_speed._under_load(lab, 0.5)
    assert found.values["under_load"][0]["power.draw"] == "441.0"
    monkeypatch.setattr(doctor_copies, "measured", lambda free: work() or Copies(full=free))
    facts = machine()
    del facts.copies
    assert set(facts.copies.full) == {0, 1}
    assert facts.as_dict()["driver_in_copies"][0]["pcie.link.gen.current"] == "4"
