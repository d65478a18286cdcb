"""scripts/doctor.py's checks, on facts of machines that are not here."""

import errno
import json
import os
import signal
import sys
from itertools import product
from unittest.mock import Mock

import doctor
import doctor_checks
import doctor_families
import doctor_findings
import doctor_kernels
import doctor_lab
import doctor_place
import doctor_quantized
import doctor_report
import doctor_runs
import doctor_steps
import pytest
import torch
from doctor_facts import Facts, Gpu, Torch
from doctor_findings import OK, PROBLEM, WARNING
from doctor_stubs import GPU, MODE, StubLab, full_findings, machine, said
from doctor_wheels import WHEELS, Wheel, tried

from backend.config import ParallelConfig
from backend.parallel.attention.kernel_table import KERNELS
from backend.protocol import Loaded, Result, Sample

pytestmark = pytest.mark.usefixtures("own_signals")


def test_a_healthy_machine_has_no_findings_but_ok():
    assert {each.status for each in doctor_checks.quick(machine())} == {OK}


NO_PEERS = [[True, False], [False, True]]
#: What is wrong -> facts, the check that says so, its status, and words of its text.
ILL: dict[str, tuple[dict, str, str, list[str]]] = {
    "an old Python": (dict(python=(3, 10, 0)), "Python", PROBLEM, ["3.10.0", "3.11"]),
    "a package missing": (dict(unmet=["yunchang>=0.6.4"]), "packages", PROBLEM, ["yunchang", "pip install"]),
    "a broken wheel": (
        dict(wheels={"flash-attn": Wheel("2.8", "undefined symbol: _ZN3c10")}),
        "wheels",
        PROBLEM,
        ["flash-attn 2.8", "undefined symbol", "torch 2.9.0", "optional"],
    ),
    "a broken flash-attn-4": (
        dict(wheels={"flash-attn-4": Wheel("4.0", "No module named 'cutlass'")}),
        "wheels",
        PROBLEM,
        ["flash-attn-4 4.0", "optional"],
    ),
    "a package that another one breaks": (
        dict(wheels={"diffusers": Wheel("1", "ImportError: cannot import name 'resolve_revision'")}),
        "wheels",
        PROBLEM,
        ["resolve_revision", "run: ", 'install --upgrade "diffusers"'],
    ),
    "a slow import": (dict(wheels={"diffusers": Wheel("1", is_slow=True)}), "wheels", WARNING, ["diffusers"]),
    "torch without CUDA": (
        dict(gpus=[], torch=Torch("2.9.0+cpu", "", "", (), "", True)),
        "CUDA",
        PROBLEM,
        ["2 GPUs", "built without CUDA", "pytorch.org"],
    ),
    "a driver too old": (dict(gpus=[]), "CUDA", PROBLEM, ["driver 580.1", "update"]),
    "hidden GPUs": (
        dict(gpus=[], variables={"CUDA_VISIBLE_DEVICES": "-1"}),
        "CUDA",
        WARNING,
        ["CUDA_VISIBLE_DEVICES"],
    ),
    "no NCCL": (dict(torch=Torch("2.9.0", "12.8", "", (), "", True)), "NCCL", PROBLEM, ["no NCCL"]),
    "no gloo": (dict(torch=Torch("2.9.0", "12.8", "", (), "2", False)), "NCCL", PROBLEM, ["no gloo"]),
    "Windows": (dict(platform="win32"), "NCCL", PROBLEM, ["WSL2"]),
    "a GPU that torch has no kernels for": (
        dict(gpus=[Gpu(0, "P100", 16 << 30, 16 << 30, (6, 0))]),
        "GPUs",
        PROBLEM,
        ["P100", "sm_80"],
    ),
    "a GPU without bf16": (
        dict(
            gpus=[Gpu(0, "T4", 16 << 30, 16 << 30, (7, 5))], torch=Torch("2", "12", "", ("sm_75",), "2", True)
        ),
        "GPUs",
        WARNING,
        ["T4", "bf16"],
    ),
    "memory taken": (
        dict(gpus=[GPU, Gpu(1, "H100", 80 << 30, 20 << 30, (9, 0))]),
        "GPUs",
        WARNING,
        ["GPU 1", "64.4 GB"],
    ),
    "two kinds of GPU": (
        dict(gpus=[GPU, Gpu(1, "A100", 80 << 30, 80 << 30, (8, 0))]),
        "GPUs",
        WARNING,
        ["differ"],
    ),
    "no peer access": (dict(peers=NO_PEERS), "peer access", WARNING, ["0-1", "host memory", "PipeFusion"]),
    "peer access that failed": (
        dict(way="NCCL_P2P_DISABLE=1"),
        "peer access",
        WARNING,
        ["NCCL_P2P_DISABLE=1", "--full"],
    ),
    "an exclusive GPU": (
        dict(driver=[{**MODE, "compute_mode": "Exclusive_Process"}]),
        "GPU modes",
        PROBLEM,
        ["-c DEFAULT"],
    ),
    "MIG": (dict(driver=[{**MODE, "mig.mode.current": "Enabled"}]), "GPU modes", PROBLEM, ["MIG"]),
    "a bad riser": (
        dict(driver=[{**MODE, "pcie.link.width.current": "4"}]),
        "GPU modes",
        WARNING,
        ["4 of 16"],
    ),
    "a full /dev/shm": (dict(free_shared_memory=3 << 20), "/dev/shm", WARNING, [" 3 MB", "nccl-*"]),
    "Docker's /dev/shm": (dict(shared_memory=64 << 20), "/dev/shm", WARNING, ["64 MB", "--shm-size"]),
    "Docker's /dev/shm without peer access": (
        dict(shared_memory=64 << 20, peers=NO_PEERS),
        "/dev/shm",
        WARNING,
        ["64 MB", "--shm-size", "GPUs without peer access send", "--full find a way"],
    ),
    "a full disk": (dict(disks={"cache folder": 1 << 20}), "disk", WARNING, ["cache folder", "TMPDIR"]),
    "a closed folder": (dict(unwritable=["temporary folder"]), "disk", PROBLEM, ["temporary", "TMPDIR"]),
    "little memory": (dict(host_memory=1 << 30), "host", WARNING, ["1.1 GB"]),
    "few cores": (dict(cores=1), "host", WARNING, ["1 cores"]),
    "no loopback": (dict(loopback="denied"), "limits", PROBLEM, ["127.0.0.1", "denied"]),
    "few open files": (dict(open_files=256), "limits", WARNING, ["256", "ulimit"]),
    "little to lock": (
        dict(locked_memory=8 << 20),
        "limits",
        WARNING,
        ["8192 kB", "memlock=-1"],
    ),
    "TF32 in float32 models": (
        dict(variables={"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}),
        "environment",
        WARNING,
        ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is 1", "float32"],
    ),
    "peer access switched off": (
        dict(variables={"NCCL_P2P_DISABLE": "1"}),
        "environment",
        WARNING,
        ["NCCL_P2P_DISABLE is 1"],
    ),
}


@pytest.mark.parametrize("name", ILL)
def test_an_ill_machine_is_told_in_words(name):
    changes, check, status, words = ILL[name]
    texts = [text for found, text in said(machine(**changes), check) if found == status]
    assert any(all(word in text for word in words) for text in texts), said(machine(**changes), check)


class Broken(Facts):
    """A machine whose driver answers nonsense."""

    @property
    def driver(self):
        raise RuntimeError("nvidia-smi failed: NVML mismatch")


def test_a_check_that_fails_stops_no_other():
    healthy = vars(machine())
    found = list(doctor_checks.quick(Broken(**{name: healthy[name] for name in healthy if name != "driver"})))
    failed = [each for each in found if "NVML mismatch" in each.text]
    assert {each.check for each in failed} == {"CUDA", "GPU modes"}
    assert {each.status for each in failed} == {PROBLEM}
    assert {each.check for each in found} == set(doctor_checks.CHECKS)


def test_a_package_is_imported_by_another_process(monkeypatch, tmp_path):
    """One that ends its process is named, and does not end ours."""
    (tmp_path / "kills.py").write_text("import os; os.abort()")
    (tmp_path / "torch.py").write_text("")  # a real one takes seconds
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(WHEELS, "kills", "kills")
    monkeypatch.setitem(WHEELS, "absent", "absent_module")
    assert tried("kills").error == "its import was ended by signal 6"
    assert "absent_module" in tried("absent").error


@pytest.mark.parametrize(("changes", "status"), [({}, 0), ({"loopback": "denied"}, 1)])
def test_the_report_has_every_finding_and_fact(monkeypatch, tmp_path, capsys, changes, status):
    facts = machine(topology="GPU0 NV18", **changes)
    monkeypatch.setattr("doctor_facts.Facts", lambda: facts)
    out = tmp_path / "report.json"
    assert doctor.main(["--json", str(out)]) == status
    report = json.loads(out.read_text())
    found = report["findings"]
    whole = {
        "facts": facts.as_dict(),
        "findings": [
            each.as_dict() | {"seconds": at["seconds"]}
            for each, at in zip(doctor_checks.quick(facts), found, strict=True)
        ],
    }
    assert {key: report[key] for key in whole} == json.loads(json.dumps(doctor_report.finite(whole)))
    assert {each["check"] for each in found} == set(doctor_checks.CHECKS)
    assert report["facts"]["gpus"][1]["capability"] == [9, 0] and report["facts"]["topology"] == "GPU0 NV18"
    assert f"{status} problems, 0 warnings" in capsys.readouterr().out


def test_full_compares_every_method_and_one_failure_stops_no_other():
    lab = StubLab(minutes=30.0)
    found = full_findings(lab)
    exact = {(each.values["method"], each.status) for each in found if "fp32" in each.values}
    assert {("tensor parallel", PROBLEM), ("ulysses", OK), ("cfg", OK), ("dp", OK), ("FSDP", OK)} <= exact
    assert {("pipefusion M=1", OK), ("pipefusion M=2", OK), ("ulysses, wire fp8", OK)} <= exact
    ended = [each for each in found if "rank 1 ended" in each.text]
    rings = [kernel for kernel in doctor_kernels.KERNELS if KERNELS[kernel].lse]
    # each also with float8 on the wire and with sharded weights, and one with compiled blocks
    once = list(doctor_families.once(lab.ranks).values()).count("ring")
    assert len(ended) == 3 * len(doctor_runs.FAMILIES) + once + 3 + 1 + len(rings)
    assert {each.status for each in ended} == {PROBLEM}
    assert "ring, wan21-t2v: this check failed" in str(ended)  # with the method's name
    assert [each.status for each in found if each.check == "memory"] == [PROBLEM] * 4
    speeds = {each.values["method"]: each.values for each in found if "speedup" in each.values}
    for family, kind in [("flux-dev", "fp8 with a LoRA"), *product(doctor_steps.SHAPES, doctor_steps.KINDS)]:
        assert speeds[f"{family}, {kind}, ulysses"]["speedup"] == 2.0
        assert speeds[f"{family}, {kind}, pipefusion M=2"]["seconds"] == 0.5
    assert speeds["wan21-t2v, ulysses"]["speedup"] == speeds["ulysses, wire fp8"]["speedup"] == 2.0
    compiled = {each.values["method"] for each in found if "eager" in each.values}
    assert compiled == {f"{name}, compiled" for name in ("one rank", "ulysses", "FSDP", "tp", "pipefusion")}
    assert speeds["ulysses"]["speedup"] == 2.0 and speeds["ulysses"]["of_ceiling"] == 0.5
    refused = [each for each in found if each.check == "quantized" and each.status == WARNING]
    assert len(refused) == len(doctor_quantized.NATIVE) and "comfy-kitchen" in refused[0].text
    assert [each.values["p2p"] for each in found if each.check == "links" and each.values] == [1e9]
    assert lab.closed


def test_full_ends_in_time_and_says_what_it_left_out():
    found = full_findings(lab := StubLab(is_late=True))
    late = [each.check for each in found if each.status == WARNING and "minutes are over" in each.text]
    assert sorted(late) == sorted(doctor_runs.RUNS) and lab.closed


def test_full_runs_what_is_asked_for():
    assert {each.check for each in full_findings(StubLab(), "--only", "links,one rank")} == {
        *("full", "links", "one rank")
    }
    assert [each.status for each in full_findings(StubLab(), "--only", "lonks")] == [PROBLEM]


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_methods_use_every_rank(ranks):
    found = doctor_runs.methods(ranks)
    assert {config.validate().world_size for config in found.values()} == {ranks}
    assert len(found) == {1: 1, 2: 11}.get(ranks, 24)


@pytest.mark.parametrize(
    ("asked", "here", "wanted"),
    [
        (("auto", 0), 2, ("cuda", 2)),
        (("auto", 0), 0, ("cpu", 2)),
        (("cpu", 4), 2, ("cpu", 4)),
        (("cuda", 1), 2, ("cuda", 1)),
    ],
)
def test_full_uses_every_gpu_unless_told_otherwise(asked, here, wanted):
    assert doctor_place.place(*asked, machine(gpus=[GPU] * here)) == wanted


def test_full_without_a_package_still_writes_the_report(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("doctor_facts.Facts", lambda: machine(topology=""))
    monkeypatch.setitem(sys.modules, "doctor_runs", None)  # importing it fails
    out = tmp_path / "report.json"
    assert doctor.main(["--full", "--json", str(out)]) == 1
    full = [each for each in json.loads(out.read_text())["findings"] if each["check"] == "full"]
    assert [each["status"] for each in full] == [PROBLEM] and "doctor_runs" in full[0]["text"]
    assert "pip install" in full[0]["text"] and full[0]["text"].endswith('requirements.txt"')


@pytest.mark.parametrize(
    "error, remedy",
    [
        (OSError(errno.ENOSPC, "No space left"), "; make room there, or set TMPDIR to another folder"),
        (PermissionError(errno.EACCES, "denied"), "; allow this user that, or set TMPDIR to another folder"),
        (KeyError("rings"), "; report it, with the file of --json"),
    ],
    ids=["a full disk", "a locked folder", "a fault"],
)
def test_what_ends_full_as_a_whole_has_a_remedy(monkeypatch, error, remedy):
    """As where its folder cannot be made: no check has begun that could say it."""
    monkeypatch.setattr(doctor_runs, "full", Mock(side_effect=error))
    (found,) = doctor.run_backend(machine(), doctor.options(["--full"]))
    assert found.status == PROBLEM and found.text.endswith(remedy)


def test_a_lab_sends_what_a_configuration_asks_of_a_request(monkeypatch, tmp_path):
    """The kernel, patches and warm-up are no part of the ranks' topology."""
    sent = []

    class Backend:
        def load(self, path, dtype, **named):
            return Loaded("tiny", "flux")

        def sample(self, message, **named):
            sent.append(message)
            return Result(tensors={"samples": torch.ones(1)})

    lab = doctor_lab.Lab("cpu", 2, 1.0)
    monkeypatch.setattr(lab, "backend", lambda config: Backend())
    config = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=4, warmup_steps=2, attention="sage")
    assert lab.run(config, tmp_path, Sample("", "euler", 1.0, 0)).samples.item() == 1
    assert (sent[0].num_pipeline_patch, sent[0].warmup_steps, sent[0].attention) == (4, 2, "sage")
    assert sent[0].model == "tiny"
    lab.close()


def test_sigterm_ends_what_full_has_started(monkeypatch):
    """As Cancel of the node sends it: Python's own answer leaves files and programs behind."""
    monkeypatch.setattr("doctor_facts.Facts", lambda: machine(topology=""))
    closed = []

    def full(chosen, facts, began):
        try:
            yield doctor_findings.Finding("full", OK, "running")
            os.kill(os.getpid(), signal.SIGTERM)
            yield doctor_findings.Finding("full", PROBLEM, "still running")
        finally:
            closed.append(True)

    monkeypatch.setattr(doctor_runs, "full", full)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or a failing test ends pytest
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--full"])
    assert ended.value.code == 128 + signal.SIGTERM and closed
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
