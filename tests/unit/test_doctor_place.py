"""Where scripts/doctor.py --full runs, on machines some or all of whose GPUs cannot be used."""

import os
from dataclasses import replace

import doctor_checks
import doctor_lab
import pytest
from doctor_facts import Gpu
from doctor_findings import PROBLEM, WARNING
from doctor_place import place, remarks
from doctor_stubs import ENDED, GPU, StubLab, full_findings, machine

from backend.client.launching.rank_environment import sanitized_environment
from backend.config import ParallelConfig


def gpu(index: int, name: str = "RTX 3090", capability: tuple[int, int] = (8, 6)) -> Gpu:
    return Gpu(index, name, 24 << 30, 24 << 30, capability)


#: A card that drives the screen, between two that compute.
OLD = gpu(1, "GTX 1080", (6, 1))
MIXED = [gpu(0), OLD, gpu(2)]


def test_a_gpu_without_kernels_is_left_out():
    facts = machine(gpus=MIXED)
    assert place("auto", 0, facts) == ("cuda", 2) == place("cuda", 0, facts)
    found = full_findings(StubLab(), "--only", "links", facts=facts)
    assert found[0].status == WARNING and "GTX 1080" in found[0].text
    assert [each.check for each in found] == ["full", "full", "links", "links"]
    (quick,) = [each for each in doctor_checks.quick(facts) if "no kernels" in each.text]
    assert "CUDA_VISIBLE_DEVICES=0,2 python scripts/doctor.py --full" in quick.text


def test_the_remedy_names_gpus_as_the_environment_does():
    facts = machine(gpus=MIXED, variables={"CUDA_VISIBLE_DEVICES": "3,4,5"})
    assert facts.command_on(facts.usable).startswith("CUDA_VISIBLE_DEVICES=3,5 ")


def test_ranks_and_benchmarks_run_on_the_gpus_that_compute(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", *doctor_lab.PLAIN_FLOAT32):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    lab = doctor_lab.Lab("cuda", 2, 1.0, [0, 2])
    environments = [
        sanitized_environment(dict(os.environ), lab._placed(config), "cuda")
        for config in (ParallelConfig(ulysses_degree=2), ParallelConfig())
    ]

    def run(command, seconds, folder, environment):
        environments.append(environment)
        return ENDED

    monkeypatch.setattr(doctor_lab.doctor_processes, "run", run)
    lab._benchmark("waits.py", 1.0)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["0,2", "0", "0,2"]
    assert doctor_lab.Lab("cuda", 2, 1.0, [0, 1])._placed(ParallelConfig()).gpus == ""
    lab.close()


def test_ranks_do_not_share_a_gpu_without_kernels():
    (found,) = remarks("auto", 2, machine(gpus=[gpu(0, "GTX 1080", (6, 1)), gpu(1)]))
    assert found.status == PROBLEM and "CUDA_VISIBLE_DEVICES=1 " in found.text and "--ranks 2" in found.text


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_windows_is_said_once(device):
    """And not by every check."""
    (found,) = full_findings(StubLab(), "--device", device, facts=machine(platform="win32"))
    assert found.status == PROBLEM and "WSL 2" in found.text


def test_more_ranks_than_gpus_are_said_once():
    """One GPU alone is shared."""
    (found,) = full_findings(StubLab(), "--ranks", "4")
    assert found.status == PROBLEM and "4 GPUs, and there are 2; run --full --ranks 2" in found.text
    assert not remarks("auto", 2, machine()) and not remarks("auto", 2, machine(gpus=[GPU]))


@pytest.mark.parametrize(
    "device, facts, runs",
    [
        ("auto", dict(gpus=[]), False),
        ("auto", dict(gpus=[], driver=[], cuda_error="the driver is too old"), False),
        ("auto", dict(gpus=[OLD]), False),
        ("cuda", dict(gpus=[], driver=[], cuda_error=""), False),
        ("cpu", dict(gpus=[]), True),
        ("auto", dict(gpus=[], driver=[], cuda_error=""), True),
        ("auto", dict(gpus=[GPU]), True),
    ],
)
def test_numbers_of_the_cpu_do_not_stand_for_gpus(device, facts, runs):
    """Ten minutes of them, where a driver is too old, say nothing of what was asked."""
    found = full_findings(StubLab(), "--device", device, "--only", "links", facts=machine(**facts))
    assert runs == any(each.check == "links" for each in found)
    if not runs:
        (only,) = found
        assert only.status == PROBLEM and "--device cpu runs small models" in only.text


@pytest.mark.parametrize(
    "sizes, ranks, command",
    [
        ((24, 24, 4), 0, "--ranks 2"),
        ((24, 4, 24), 0, "CUDA_VISIBLE_DEVICES=0,2 "),
        ((24, 4, 24), 3, "CUDA_VISIBLE_DEVICES=0,2 "),
        ((24, 24, 4), 2, ""),
        ((24, 24, 8), 0, ""),
        ((4,), 2, ""),
    ],
)
def test_a_card_with_little_memory_is_warned_of_first(sizes, ranks, command):
    """As one that drives the screen: every timed check of several ranks would fail."""
    gpus = [replace(gpu(index), memory=size << 30) for index, size in enumerate(sizes)]
    found = remarks("auto", ranks, machine(gpus=gpus))
    assert [each.status for each in found] == [WARNING] * bool(command)
    assert all(command in each.text and "(RTX 3090, 4.3 GB)" in each.text for each in found)


@pytest.mark.parametrize("device, warned", [("auto", True), ("cpu", False)])
def test_files_that_take_memory_are_warned_of(device, warned):
    """As in /tmp of systems that mount a tmpfs there; those of the CPU are small."""
    found = remarks(device, 2, machine(is_temporary_in_memory=True))
    assert [each.status for each in found] == [WARNING] * warned
    assert not warned or "set TMPDIR to a disk" in found[0].text
    assert not remarks(device, 2, machine())
