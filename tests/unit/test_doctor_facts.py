"""What scripts/doctor.py reads of a machine, from packages and drivers that are not here."""

from types import SimpleNamespace

import doctor_checks
import doctor_facts
import pytest
import torch
from doctor_facts import Facts
from doctor_findings import OK, PROBLEM, WARNING
from doctor_stubs import machine
from doctor_wheels import is_installed


@pytest.mark.parametrize("installed, other", [("flash-attn", "flash-attn-4"), ("flash-attn-4", "flash-attn")])
def test_one_flash_attention_does_not_stand_for_another(monkeypatch, tmp_path, installed, other):
    """FlashAttention 2 and 4 share the folder flash_attn."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    info = tmp_path / f"{installed.replace('-', '_')}-2.8.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {installed}\nVersion: 2.8.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed(installed) and not is_installed(other)


def test_a_driver_that_is_too_old_is_one_problem(monkeypatch):
    """torch counts GPUs by the driver, and raises once it uses one."""

    def too_old(*_):
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.cuda, "get_device_properties", too_old)
    facts = machine()
    del facts.gpus
    problems = [each for each in doctor_checks.quick(facts) if each.status == PROBLEM]
    assert [each.check for each in problems] == ["CUDA"]
    assert "11040" in problems[0].text and "update the driver" in problems[0].text


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


def test_a_driver_that_was_updated_while_it_ran_asks_for_a_restart(monkeypatch):
    """torch counts no GPU then, and says why only where it is to use one."""

    def init():
        raise RuntimeError("Error 803: system has unsupported display driver / cuda driver combination\n...")

    answer = SimpleNamespace(stdout=MISMATCH + "\nNVML library version: 550.120\n", stderr="", returncode=18)
    monkeypatch.setattr(doctor_facts.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor_facts.driver_query, "answer", lambda *_: answer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", init)
    facts = machine()
    for name in ("gpus", "driver", "smi"):
        delattr(facts, name)
    found = {each.check: each for each in doctor_checks.quick(facts) if each.status != OK}
    assert [(name, each.status) for name, each in found.items()] == [
        ("CUDA", PROBLEM),
        ("GPU modes", WARNING),
    ]
    assert all(word in found["CUDA"].text for word in ("Error 803", MISMATCH, "restart the machine"))


def test_warnings_of_the_driver_are_no_gpus(monkeypatch):
    row = "0, NVIDIA GeForce RTX 4090, 550.90, Default, [N/A], 16, 16, 4, 450.00, 41, 210, GPU-1a\n"
    answer = SimpleNamespace(stdout="WARNING: infoROM is corrupted, gpu 0\n" + row, stderr="", returncode=0)
    monkeypatch.setattr(doctor_facts.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor_facts.driver_query, "answer", lambda *_: answer)
    (gpu,) = Facts().driver
    assert gpu["name"] == "NVIDIA GeForce RTX 4090"
