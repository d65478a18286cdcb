"""What scripts/doctor.py --full makes of what ranks answer."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import doctor
import doctor_findings
import doctor_lab
import doctor_links
import doctor_memory
import doctor_models
import doctor_runs
import pytest
import torch
from doctor_findings import OK, PROBLEM, WARNING
from doctor_stubs import GPU, MODE, StubLab, full_findings, machine, said

from backend.client.auto.probe_process import UnmeasuredError
from backend.config import ParallelConfig
from backend.errors import UnsupportedError
from backend.hardware.gpu_sharing import SHARED_GPU
from backend.protocol import BackendError, RefusedError
from backend.quantization import matmul
from backend.sampling.tensor_validation import check_result
from backend.sampling.validation import refusing


@pytest.mark.parametrize("capability", [(8, 6), None], ids=["8.6", "AMD"])
def test_a_gpu_without_float8_products_is_no_fault(monkeypatch, capability):
    why = matmul._device_objection(matmul.RULES["float8_e4m3fn"], "native", torch.device("cuda"), capability)

    class Lab(StubLab):
        def run(self, config, path, sample, dtype="default", matmul="auto"):
            if matmul == "native":
                raise RefusedError(f"native is not possible: {why}")
            return super().run(config, path, sample, dtype, matmul)

    lab = Lab()
    found = [each for each in full_findings(lab, "--only", "quantized") if "native" in each.text]
    assert why and {each.status for each in found} == {OK}


@pytest.mark.parametrize("width, count, status", [("8", 2, OK), ("4", 2, WARNING), ("8", 1, WARNING)])
def test_boards_share_lanes_among_gpus(width, count, status):
    driver = [{**MODE, "pcie.link.width.current": width}] * count
    ((found, text), *_) = said(machine(driver=driver), "GPU modes")
    assert found == status and f"{width} of 16" in text


@pytest.mark.parametrize("ring, status", [(5e9, WARNING), (50e9, OK)])
def test_rings_and_the_link_to_the_host_are_told(ring, status):
    """Of two bridged pairs: the links between the pairs count."""

    class Lab(StubLab):
        def machine(self):
            return replace(super().machine(), p2p=50e9, rings={2: 50e9, 4: ring}, host_link=25e9)

    lab = Lab()
    lab.device = "cuda"
    rates, links = doctor_runs.links(lab)
    assert "from host memory 25.0 GB/s" in rates.text and rates.values["host_link"] == 25e9
    assert f"rings of 2 ranks 50.00, 4 ranks {ring / 1e9:.2f} GB/s" in links.text
    assert rates.values["rings"] == {2: 50e9, 4: ring} and links.status == status


def test_ways_that_failed_before_the_one_that_works_are_in_the_report(monkeypatch):
    """With what NCCL printed in each."""
    failed = [UnmeasuredError("no answer"), UnmeasuredError("other bytes")]
    failed[0].log, failed[1].log = "NCCL WARN connect", "NCCL WARN shm"
    monkeypatch.setattr(doctor_links, "FAILED", failed)

    class Lab(StubLab):
        def machine(self):
            return replace(super().machine(), links="GPUs fail to reach each other's memory here.")

    warned = [each for each in doctor_runs.links(Lab()) if each.status == WARNING]
    assert [each.values["log"] for each in warned] == [
        "no answer:\nNCCL WARN connect\n\nother bytes:\nNCCL WARN shm"
    ]


@pytest.mark.parametrize(
    "device, distance, status, says",
    [
        ("cpu", 5e-6, OK, "limit 1e-05"),
        ("cpu", 1e-4, PROBLEM, "limit 1e-05"),
        ("cuda", 5e-6, OK, "limit 0.001"),
        ("cuda", 1e-4, WARNING, "float32 1.0e-04 from one rank"),
        ("cuda", 1e-4, WARNING, "other kernels of GPUs may explain it: report it"),
        ("cuda", 1e-2, PROBLEM, "limit 0.001"),
        ("cuda", float("nan"), PROBLEM, "inf from one rank"),
    ],
)
def test_gpus_may_add_in_another_order(device, distance, status, says):
    class Lab(StubLab):
        def run(self, config, path, sample, dtype="default", matmul="auto"):
            off = 1e-2 if dtype == "bf16" else distance * (config.world_size > 1)
            return doctor_lab.Run(torch.ones(4) * (1 + off), 1.0)

    lab = Lab()
    lab.device = device
    found = doctor_runs._method(lab, "ulysses", ParallelConfig(ulysses_degree=2), "flux-dev")
    assert found.status == status and says in found.text, found.text


@pytest.mark.parametrize(
    "exact, half, status", [(0.0, float("nan"), PROBLEM), (1e-4, float("nan"), PROBLEM), (0.0, 0.1, PROBLEM)]
)
def test_bf16_of_a_method_is_judged_by_itself(exact, half, status):
    """Half precision has other kernels than float32."""

    class Lab(StubLab):
        def run(self, config, path, sample, dtype="default", matmul="auto"):
            off = half if dtype == "bf16" else exact
            if config.world_size == 1:
                off = 1e-2 if dtype == "bf16" else 0.0
            return doctor_lab.Run(torch.ones(4) * (1 + off), 1.0)

    lab = Lab()
    lab.device = "cuda"
    found = doctor_runs._method(lab, "ring", ParallelConfig(ring_degree=2), "flux-dev")
    assert found.status == status, found.text


@pytest.mark.parametrize("fails", ["one rank", "the ceiling"])
def test_methods_are_timed_though_what_they_are_compared_with_fails(fails):
    """As on a GPU that is too small for the whole model: the seconds are worth as much."""

    class Lab(StubLab):
        def step_seconds(self, config, path, request, **how):
            which = "one rank" if config.world_size == 1 else "the ceiling"
            if which == fails and config.world_size == config.data_parallel_degree:
                raise RefusedError("rank 0 needs 30 GB") if fails == "one rank" else BackendError("it ended")
            return super().step_seconds(config, path, request, **how)

    found = full_findings(Lab(), "--only", "speed,shapes")
    of_methods = {each.values["method"]: each for each in found if "seconds" in each.values}
    assert {"ulysses", "tp", "wan21-t2v, ulysses"} <= set(of_methods), set(of_methods)
    assert ("speedup" in of_methods["ulysses"].values) == (fails == "the ceiling")
    assert "of_ceiling" not in of_methods["ulysses"].values


def computed_nothing():
    check_result(torch.full((2,), float("nan")), "a.safetensors", torch.bfloat16, "auto")


def unforeseen():
    with refusing("the model"):
        raise KeyError("a")


@pytest.mark.parametrize("fault", [computed_nothing, unforeseen])
def test_a_refusal_of_what_is_broken_is_a_problem(fault):
    with pytest.raises(UnsupportedError) as error:
        fault()
    assert doctor_findings.refused("methods", "ring", RefusedError(str(error.value))).status == PROBLEM


def short_of_memory():
    refusal = RefusedError("Rank 1 has 14 GB free and needs 30 GB")
    refusal.lacking = {1: 30_000_000_000}
    return refusal


def test_a_card_that_is_too_small_for_a_check_is_no_refusal():
    """It says which check needs how much, wherever the ranks lack it."""

    class Lab(StubLab):
        def run(self, config, path, sample, dtype="default", matmul="auto", loras=()):
            raise short_of_memory()

    only = "speed,methods,memory,kernels,quantized,fp8 and int8,shapes,one rank"
    found = full_findings(Lab(), "--only", only)
    short = [each for each in found if each.check not in ("full", "memory")]
    assert {each.check for each in short} == {
        *("speed", "methods", "kernels", "quantized", "fp8 and int8", "shapes", "one rank"),
        "speed of one rank",
    }
    for each in short:
        again = f'to try it again: --only "{each.check}"'
        words = ("30.0 GB free for rank 1", again, "smaller cards", "close what else")
        assert all(word in each.text for word in words), each.text
        assert each.status == WARNING and "refus" not in each.text and "failed" not in each.text
        assert each.values["needs"] == {1: 30_000_000_000}


def test_ranks_that_run_out_in_the_middle_are_to_be_reported():
    def fails(lab):
        raise BackendError("rank 1 ran out of memory in the middle of a request, with 1 GB free")

    (found,) = doctor_findings.findings("speed", fails, None)
    assert found.status == WARNING and "than was planned" in found.text and "report it" in found.text


def test_a_rank_that_runs_out_in_the_middle_is_not_called_a_refusal():
    """It is a refusal without numbers of what lacks."""

    class Lab(StubLab):
        def run(self, config, path, sample, dtype="default", matmul="auto", loras=()):
            if config.world_size > 1 or config.attention == "sage" or matmul == "native":
                raise RefusedError("rank 0 ran out of memory in the middle of a request, with 1 GB free")
            return super().run(config, path, sample, dtype, matmul)

    found = full_findings(Lab(), "--only", "methods,speed,kernels,quantized,shapes")
    short = [each for each in found if "ran out of memory" in each.text]
    assert {each.check for each in short} == {"methods", "speed", "kernels", "quantized", "shapes"}
    assert any("native: more memory" in each.text for each in short if each.check == "quantized")
    for each in short:
        assert each.status == WARNING and "than was planned" in each.text and "not possible" not in each.text


def test_a_native_product_that_gave_up_is_a_problem():
    """Ranks go on by the dequantized weight, with its very latent."""

    class Lab(StubLab):
        def run(self, config, path, sample, dtype="default", matmul="auto"):
            return doctor_lab.Run(torch.ones(4), 1.0)

    found = [each for each in full_findings(Lab(), "--only", "quantized") if "native" in each.text]
    assert found and {each.status for each in found} == {PROBLEM}
    assert "went on weight only" in found[0].text


def test_degrees_that_do_not_divide_a_model_are_no_problem():
    """Five GPUs, for example: 24 heads are no multiple of them."""

    class Lab(StubLab):
        def run(self, config, path, sample, dtype="default", matmul="auto"):
            if config.world_size > config.data_parallel_degree:
                raise RefusedError("tensor_parallel_degree is 5, and there are 24 heads")
            return doctor_lab.Run(torch.ones(4), 1.0)

        def fresh(self):
            """The ranks of nobody end."""

        def backend(self, config):
            return SimpleNamespace(welcome=SimpleNamespace(pids=[os.getpid()]))

    lab = Lab()
    lab.ranks = 5
    found = full_findings(lab, "--only", "methods,speed,shapes,compiled,memory")
    refused = [each for each in found if "24 heads" in each.text]
    assert {each.check for each in refused} == {"methods", "speed", "shapes", "compiled", "memory"}
    assert not [each for each in threading.enumerate() if isinstance(each, doctor_memory.MemoryWatch)]
    assert {each.status for each in found} == {OK}
    assert "tensor parallel, flux-dev: not possible" in str(refused)


def test_ranks_may_end_while_their_memory_is_watched(monkeypatch):
    """As at the end of the minutes: the thread's traceback stood between the findings."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ranks = SimpleNamespace(welcome=SimpleNamespace(pids=[process.pid]))
        lab = SimpleNamespace(device="cpu", backend=lambda config: ranks)
        watch = doctor_memory.MemoryWatch(lab, ParallelConfig())
        process.kill()
    watch.join(60)
    assert not watch.is_alive() and not raised and watch.stop()[0] >= 0


@pytest.mark.parametrize("only, checks", [("", ["full", "full", "links", "links"]), ("methods", ["full"])])
def test_the_registrys_archive_runs_links_alone(monkeypatch, tmp_path, only, checks):
    """It has neither tests nor benchmarks."""
    monkeypatch.setattr(doctor_models, "BENCHMARKS", tmp_path / "benchmarks")
    found = full_findings(StubLab(), "--only", only)
    assert [each.check for each in found] == checks
    assert [each.status for each in found] == [WARNING, *[OK] * (len(checks) - 1)]
    assert "clone the repository" in found[0].text and "benchmarks" in found[0].text


@pytest.mark.parametrize("gpus, shares", [(1, True), (2, False)])
def test_ranks_share_one_gpu_where_they_are_asked_for(monkeypatch, gpus, shares):
    """They show what methods compute; nothing is timed."""
    monkeypatch.setenv(SHARED_GPU, "")
    monkeypatch.delenv(SHARED_GPU)
    facts = machine(gpus=[GPU, replace(GPU, index=1)][:gpus])
    found = full_findings(StubLab(), "--ranks", "2", facts=facts)
    assert (SHARED_GPU in os.environ) == shares == ("share one GPU" in found[0].text)
    checks = {each.check for each in found} - {"full"}
    assert checks == {"one rank", "methods", "waits"} if shares else {"links", "speed"} < checks
    (only, *others) = full_findings(StubLab(), "--ranks", "2", "--only", "speed", facts=facts)
    assert not others and only.status == WARNING if shares else others


def test_no_chart_without_benchmarks_is_no_traceback(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "report", None)  # importing it fails
    doctor.draw([], tmp_path / "speeds.png")


def test_a_chart_that_cannot_be_written_is_no_traceback(tmp_path, capsys):
    """As next to /dev/stdout."""
    timed = doctor_findings.Finding("speed", OK, "", {"method": "ulysses", "speedup": 1.7})
    (tmp_path / "file").write_text("")
    doctor.draw([timed], tmp_path / "file" / "speeds.png")
    assert "cannot be written" in capsys.readouterr().out
