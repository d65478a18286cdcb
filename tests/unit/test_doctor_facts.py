"""What scripts/doctor.py reads of a machine, from packages and drivers that are not here."""

import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import doctor_build
import doctor_checks
import doctor_facts
import pytest
import torch
from doctor_facts import Facts, Gpu, Torch
from doctor_findings import OK, PROBLEM, WARNING
from doctor_stubs import machine, said
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


@pytest.fixture
def lost_gpu(monkeypatch):
    """Facts of a machine whose nvidia-smi hangs, and what asks torch for its GPUs in this process."""
    asked = []

    def hang(name, answer):
        return lambda *_: asked.append(name) or answer

    for name, answer in (("device_count", 0), ("init", None), ("get_arch_list", [])):
        monkeypatch.setattr(torch.cuda, name, hang(name, answer))
    facts = machine(smi=("", doctor_facts.TIMED_OUT), driver=[])
    for name in ("gpus", "torch"):
        delattr(facts, name)
    return facts, asked


def test_a_driver_that_hangs_is_asked_by_another_process_alone(monkeypatch, lost_gpu):
    """This one would wait for a lost GPU for ever: torch counts GPUs by the driver, too."""
    facts, asked = lost_gpu
    monkeypatch.setattr(doctor_facts, "ASKS_DRIVER", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor_facts, "CUDA_SECONDS", 0.5)
    checks = iter(doctor_checks.cuda(facts))
    assert next(checks)[0] == WARNING and "hang" not in vars(facts)  # said before the wait
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27))
    status, text = next(checks)
    assert status == PROBLEM and "restart the machine" in text
    assert "CUDA did not start within 0.5 s" in text and doctor_facts.TIMED_OUT in text
    assert facts.gpus == facts.usable == [] and asked == []


def test_a_driver_that_is_slow_is_asked_again(monkeypatch, lost_gpu):
    facts, asked = lost_gpu
    monkeypatch.setattr(doctor_facts, "ASKS_DRIVER", "")
    assert facts.cuda_error == "" and facts.torch.archs == ()
    assert set(asked) == {"init", "device_count", "get_arch_list"}


def test_warnings_of_the_driver_are_no_gpus(monkeypatch):
    row = "0, NVIDIA GeForce RTX 4090, 550.90, Default, [N/A], 16, 16, 1, 4, 450.00, 41, 210, GPU-1a\n"
    answer = SimpleNamespace(stdout="WARNING: infoROM is corrupted, gpu 0\n" + row, stderr="", returncode=0)
    monkeypatch.setattr(doctor_facts.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor_facts.driver_query, "answer", lambda *_: answer)
    (gpu,) = Facts().driver
    assert gpu["name"] == "NVIDIA GeForce RTX 4090"


#: torch for two cards and a processor's own GPU, for which it has no kernels.
ROCM = Torch("2.9.0", "", "6.4", ("gfx1100", "gfx90a"), "RCCL", True)
CARD = Gpu(0, "Radeon RX 7900 XTX", 24 << 30, 22 << 30, (11, 0), arch="gfx1100")
OWN = Gpu(2, "AMD Radeon Graphics", 16 << 30, 14 << 30, (10, 3), arch="gfx1036")
THREE = [[True] * 3] * 3


def amd(**changes) -> Facts:
    """A machine without nvidia-smi, as Linux shows it."""
    gpus = [CARD, replace(CARD, index=1)]
    return machine(**dict(torch=ROCM, gpus=gpus, driver=[], smi=("", "")) | changes)


def test_amds_gpus_have_what_is_known_and_what_is_not():
    found = list(doctor_checks.quick(amd()))
    assert [each.check for each in found if each.status != OK] == ["GPU modes"]
    texts = {each.check: each.text for each in found if each.status == OK}
    assert "torch 2.9.0 with ROCm 6.4" in texts["CUDA"] and texts["NCCL"].startswith("RCCL, which is NCCL")
    assert texts["GPUs"].endswith("25.8 GB, gfx1100")
    ((_, unknown),) = said(amd(), "GPU modes")
    assert all(word in unknown for word in ("rocm-smi", "nobody has tried", "--full", "report it"))


def test_an_amd_gpu_without_kernels_is_a_problem():
    """Its name decides, as it does for ranks; compute capabilities are NVIDIA's."""
    facts = amd(gpus=[CARD, replace(CARD, index=1), OWN], peers=THREE)
    assert facts.usable == [0, 1]
    (text,) = [text for status, text in said(facts, "GPUs") if status == PROBLEM]
    assert text.startswith(
        "GPU 2: AMD Radeon Graphics, 17.2 GB, gfx1036, for which this torch has no kernels"
    )
    assert "HIP_VISIBLE_DEVICES=0,1 python" in text
    seen = amd(gpus=facts.gpus, peers=THREE, variables={"CUDA_VISIBLE_DEVICES": "1,3,4"})
    assert seen.command_on(seen.usable).startswith("CUDA_VISIBLE_DEVICES=1,3 ")


def test_torch_for_amd_without_a_gpu_says_what_may_hide_it():
    facts = amd(gpus=[], peers=[], cuda_error="")
    ((status, text),) = said(facts, "CUDA")
    assert status == WARNING and "groups render and video" in text and "--device=/dev/kfd" in text
    assert not said(facts, "GPU modes")


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
@pytest.mark.parametrize("value", ["", "-1"])
def test_a_variable_that_hides_every_amd_gpu_is_named(name, value):
    ((status, text),) = said(amd(gpus=[], peers=[], cuda_error="", variables={name: value}), "CUDA")
    assert status == WARNING and text.endswith(f"{name} hides every GPU: unset it")


def test_the_name_of_an_amd_gpu_is_read_from_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    card = SimpleNamespace(name="RX", total_memory=24 << 30, major=11, minor=0, gcnArchName="gfx1100:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(doctor_facts.measurements, "free_memory", lambda device, indices: (22 << 30,))
    (gpu,) = Facts(torch=ROCM, smi=("", "")).gpus
    assert gpu.arch == "gfx1100" and Facts(torch=ROCM, gpus=[gpu]).usable == [0]


def git(folder, *arguments):
    named = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *named, *arguments], check=True, capture_output=True)


@pytest.fixture
def pack(tmp_path):
    """The pack within another repository, as in ComfyUI's custom_nodes."""
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "ComfyUI")
    folder = tmp_path / "custom_nodes" / "parallel-dit"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nversion = "0.9.1"\n')
    return folder


def test_the_pack_is_not_the_repository_around_it(pack, monkeypatch):
    assert doctor_build.version_of(pack) == "0.9.1"  # as the registry installs it
    git(pack, "init")
    git(pack, "commit", "--allow-empty", "-m", "pack")
    commit = doctor_build.version_of(pack)
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git refuses "dubious ownership"
    assert doctor_build.version_of(pack) == commit
    monkeypatch.setenv("PATH", "")
    assert doctor_build.version_of(pack) == "0.9.1"
    (pack / "pyproject.toml").unlink()
    assert doctor_build.version_of(pack) == "unknown"


@pytest.mark.parametrize("sign", [".dockerenv", "run/.containerenv", "KUBERNETES_SERVICE_HOST"])
def test_a_container_is_known_and_has_its_own_memory(monkeypatch, tmp_path, sign):
    (tmp_path / "run").mkdir()
    places = tuple(tmp_path / place.relative_to("/") for place in doctor_build.OF_CONTAINERS)
    monkeypatch.setattr(doctor_build, "OF_CONTAINERS", places)
    monkeypatch.setattr(doctor_build, "host_bytes", lambda: 48 * 10**9)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert doctor_build.build()["system"] in ("", "WSL")
    if sign.isupper():
        monkeypatch.setenv(sign, "10.0.0.1")
    else:
        (tmp_path / sign).write_text("")
    found = doctor_build.build()
    assert found["memory"] == "48 GB" and ("Kubernetes" if sign.isupper() else "container") in found["system"]
