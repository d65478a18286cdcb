"""Every warning and problem of scripts/doctor.py --full says what to do next."""

import errno
from dataclasses import replace

import doctor
import doctor_findings
import doctor_lab
import doctor_next
import doctor_runs
import pytest
import torch
from doctor_findings import OK, PROBLEM, WARNING, Finding
from doctor_next import advised
from doctor_stubs import GPU, StubLab, full_findings, machine
from safetensors import SafetensorError
from safetensors.torch import save_file

from backend.client.auto.probe_process import UnmeasuredError
from backend.hardware.gpu_sharing import SHARED_GPU
from backend.protocol import BackendError

#: A GPU that this torch has no kernels for.
OLD = replace(GPU, capability=(6, 1))


class Wrong(StubLab):
    """GPUs whose ranks compute something else, slowly."""

    device = "cuda"

    def run(self, config, path, sample, dtype="default", matmul="auto", loras=()):
        off = 1.0 * (config.world_size > 1 or matmul == "native" or config.attention != "auto")
        return doctor_lab.Run(torch.ones(4) * (1 + off + (config.compile == "blocks")), 1.0)

    def step_seconds(self, config, path, request, **how):
        return 1.0 + (config.world_size > 1), self.run(config, path, request(2), **how)

    def distances_from_comfyui(self, family, sample, samples, golden):
        return 1.0, 1.0


class Ending(StubLab):
    """Ranks that end."""

    def run(self, config, path, sample, dtype="default", **how):
        raise BackendError("rank 1 ended")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lab", [Wrong, Ending, StubLab])
def test_what_is_wrong_has_a_next_step(lab, ranks):
    here = lab()
    here.ranks = ranks
    found = [advised(each) for each in full_findings(here)]
    wrong = [each for each in found if each.status != OK]
    assert wrong and all(any(words in each.text for words in STEPS) for each in wrong)
    assert all(each.text.count("report it") <= 1 for each in found)
    if ranks == 1:
        life = [each.text for each in found if each.check == "life"]
        assert life and not any("weights" in text or "report it" in text for text in life)
    elif lab is Wrong:
        checks = {each.check for each in wrong if each.status == PROBLEM}
        assert checks >= {"one rank", "methods", "speed", "shapes", "compiled", "quantized", "kernels"}
        methods = next(each.text for each in wrong if each.check == "methods")
        assert "choose another method in Parallel Config, and report it" in methods
        compiled = next(each.text for each in wrong if each.check == "compiled")
        assert "set compile of Parallel Config to off, and report it" in compiled


#: What a reader can do.
STEPS = (
    *("report it", "leave ", "set ", "close ", "install", "nothing has to be done", "prefer "),
    *("(--ranks 2)",),
)


def test_checks_of_the_table_are_checks():
    assert {check for check, _ in doctor_next.NEXT} <= set(doctor_runs.RUNS)


def test_a_finding_that_says_it_is_left_alone():
    for text in ("2 GB are free; set TMPDIR to a larger disk", "not run; raise --minutes"):
        assert advised(Finding("memory", WARNING, text)).text == text
    assert advised(Finding("memory", OK, "fine")).text == "fine"


@pytest.mark.parametrize(
    "facts, arguments, words",
    [
        (machine(), ["--only", "lonks"], "there are links"),
        (machine(gpus=[GPU], usable=[0]), ["--ranks", "2"], "nothing is timed"),
        (machine(gpus=[OLD, replace(GPU, index=1)]), ["--ranks", "2"], "CUDA_VISIBLE_DEVICES=1 python"),
        (machine(gpus=[OLD]), [], "--device cpu"),
    ],
    ids=["a typo", "one GPU", "one of two GPUs", "no GPU"],
)
def test_what_was_asked_for_is_not_reported(monkeypatch, facts, arguments, words):
    monkeypatch.setenv(SHARED_GPU, "")
    monkeypatch.delenv(SHARED_GPU)
    found = [advised(each) for each in full_findings(StubLab(), *arguments, facts=facts)]
    of_full = [each.text for each in found if each.check == "full" and each.status != OK]
    assert any(words in text for text in of_full) and not any("report it" in text for text in of_full)


def test_links_that_fail_have_their_own_remedy():
    class Lab(StubLab):
        def machine(self):
            raise UnmeasuredError("ranks did not meet", "run it anew: the machine was busy", True)

    class Broken(StubLab):
        def machine(self):
            raise KeyError("rings")

    (found,) = full_findings(Lab(), "--only", "links")[1:]
    assert found.status == PROBLEM and advised(found).text == found.text
    (found,) = full_findings(Broken(), "--only", "links")[1:]
    assert advised(found).text.endswith(doctor_next.REPORT)


def test_words_within_words_say_nothing():
    """As in what a socket raises."""

    def fails(lab):
        raise ConnectionResetError("[Errno 104] Connection reset by peer")

    (found,) = doctor_findings.findings("methods", fails, None)
    assert advised(found).text.endswith("report it, with the file of --json")


def test_who_has_no_file_to_report_is_asked_for_one(monkeypatch, capsys):
    found = [Finding("methods", PROBLEM, "off; report it, with the file of --json")]
    doctor.conclude(found, doctor.options(["--full"]))
    assert "--json doctor.json" in capsys.readouterr().out


def test_a_full_disk_is_recognized_in_what_safetensors_raises(tmp_path):
    """Which is no OSError, and names the number in its text."""
    with pytest.raises(SafetensorError) as missing:
        save_file({"weight": torch.ones(1)}, tmp_path / "no folder/model.safetensors")
    assert "(os error 2)" in str(missing.value)

    def write(number):
        raise SafetensorError(str(missing.value).replace("(os error 2)", f"(os error {number})"))

    for number in doctor_findings.NO_DISK:
        (found,) = doctor_findings.findings("quantized", write, number)
        assert advised(found).text.endswith("; make room there, or set TMPDIR to another folder")
    (found,) = doctor_findings.findings("quantized", write, errno.ENOENT)
    assert advised(found).text.endswith("; report it, with the file of --json")
