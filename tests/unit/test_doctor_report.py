"""The file of scripts/doctor.py: there whatever ends the doctor, readable, and without names."""

import getpass
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import doctor
import doctor_report
import pytest
from doctor_findings import OK, Finding
from doctor_report import Report, anonymous
from doctor_stubs import GPU, machine

from backend.client import status

pytestmark = pytest.mark.usefixtures("own_signals")
FOUND = Finding("links", OK, "fast", {"p2p": float("inf"), "rows": [{"distance": float("nan")}]})


def written(path: Path) -> dict:
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(path.read_text(), parse_constant=refuse)


def test_the_file_is_there_from_the_first_moment(tmp_path):
    """With every finding until now; numbers that are none are words, which JSON has."""
    path = tmp_path / "doctor.json"
    report = Report(path, {"full": True}, machine())
    assert written(path)["ended"] == "running" and not written(path)["findings"]
    report.add(FOUND)
    logging.getLogger().warning("GPUs do not reach each other")
    report.add(FOUND)
    half = written(path)
    assert half["ended"] == "running" and len(half["findings"]) == 2 and half["findings"][0]["seconds"] < 5
    assert half["findings"][0]["values"] == {"p2p": "inf", "rows": [{"distance": "nan"}]}
    assert half["log"] == ["GPUs do not reach each other"] and half["facts"]["gpus"][0]["name"] == "H100"
    report.close("complete")
    assert written(path)["ended"] == "complete" and not list(tmp_path.glob("*.part"))
    assert report.log not in logging.getLogger().handlers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_was_found_until_an_interrupt_is_reported(tmp_path, monkeypatch, capfd, number):
    """Ctrl-C ends it with what was found, for who looks at it; a signal is another program's. A second one
    does not keep it from ending what it has started, and no request is waited for (SystemExit)."""
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    usual[signal.SIGINT] = signal.default_int_handler  # whatever this was started by ignores
    for each, handler in usual.items():
        signal.signal(each, handler)
    ended_by = []

    def checks(facts):
        yield FOUND
        try:
            os.kill(os.getpid(), number)
            yield FOUND
        except BaseException as end:
            os.kill(os.getpid(), number)
            ended_by.append(type(end))
            raise

    monkeypatch.setattr("doctor_checks.quick", checks)
    monkeypatch.setattr("doctor_facts.Facts", machine)
    path = tmp_path / "doctor.json"
    if number == signal.SIGINT:
        assert doctor.main(["--json", str(path)]) == 130
        said = capfd.readouterr().out
        assert "interrupted: ending the ranks" in said and "0 problems, 0 warnings" in said
    else:
        with pytest.raises(SystemExit):
            doctor.main(["--json", str(path)])
    assert ended_by == [SystemExit]
    ended = "interrupted" if number == signal.SIGINT else f"signal {int(number)}"
    assert written(path)["ended"] == ended and len(written(path)["findings"]) == 1


def test_a_file_that_cannot_be_written_is_said_first(tmp_path, monkeypatch, capsys):
    """Not after ten minutes."""
    monkeypatch.setattr("doctor_facts.Facts", machine)
    monkeypatch.setattr("doctor_checks.quick", lambda facts: 1 / 0)
    assert doctor.main(["--json", str(tmp_path / "no folder/doctor.json")]) == 1
    assert "cannot be written" in capsys.readouterr().out


def test_nobody_is_named(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(socket, "gethostname", lambda: "attic-pc")
    monkeypatch.setenv("HOME", "/people/jane")
    text = "/people/jane/ComfyUI on attic-pc: /media/jane/disk, janet's attic-pc2"
    assert anonymous(text) == "~/ComfyUI on HOST: /media/USER/disk, janet's attic-pc2"
    monkeypatch.setattr(socket, "gethostname", lambda: "attic-pc.lan")
    assert anonymous("attic-pc.lan:8234 [0] NCCL WARN; attic-pc:8234") == "HOST:8234 [0] NCCL WARN; HOST:8234"
    text = "/people/janet/x /people/jane, '/people/jane' /home/joe/x /mnt/c/Users/J. Doe/x (of root_boss)"
    monkeypatch.setenv("SUDO_USER", "root_boss")
    assert anonymous(text) == "/people/janet/x ~, '~' /home/USER/x /mnt/c/Users/USER/x (of USER)"
    monkeypatch.setattr(sys, "prefix", "/people/jane/venv")
    monkeypatch.setattr(tempfile, "tempdir", "/scratch/of our lab")
    monkeypatch.setattr(doctor_report, "ROOT", Path("/disk7/pack"))
    assert '"ends": "a/b"' in anonymous('"who": "/mnt/c/Users/Jo",\n"ends": "a/b"')
    text = "/people/jane/venv/lib, /scratch/of our lab/a, /disk7/pack/backend, /disk7/pack-2"
    assert anonymous(text) == "PYTHON/lib, TMPDIR/a, PACK/backend, /disk7/pack-2"
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert anonymous("root cause") == "root cause"


@pytest.mark.parametrize("name", ["nas", "1000", "torch", "100"])
def test_a_name_that_json_has_too_is_replaced_in_texts_alone(tmp_path, monkeypatch, name):
    """The letter of an escaped newline, a number or a key may be one."""
    usual = Path(tmp_path / "usual.json")
    monkeypatch.setattr(socket, "gethostname", lambda: "attic-pc")
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    said = "jane wrote\nas asked, 1000 times"
    found = Finding("links", OK, said, {"ranks": 1000, "torch": 100})
    for path in (usual, tmp_path / "report.json"):
        report = Report(path, {"full": True, "minutes": 1000}, machine())
        report.add(found)
        report.close("complete")
        monkeypatch.setattr(socket, "gethostname", lambda: name)
        monkeypatch.setattr(getpass, "getuser", lambda: name)
    before, after = written(usual), written(tmp_path / "report.json")
    assert before["findings"][0]["values"] == after["findings"][0]["values"] == found.values
    assert before["facts"].keys() == after["facts"].keys() and after["options"]["minutes"] == 1000
    expected = said.replace("1000", "USER") if name == "1000" else said
    assert after["findings"][0]["text"] == expected


def test_the_name_that_dns_has_of_the_machine_is_left_out(monkeypatch):
    """torchrun's table of failures has it; a server of names that does not answer is waited for once."""
    answers, asked = threading.Event(), []

    def getfqdn(host):
        asked.append(host)
        answers.wait(60)
        return f"{host}.lab.example.org"

    monkeypatch.setattr(socket, "gethostname", lambda: "attic-7")
    monkeypatch.setattr(socket, "getfqdn", getfqdn)
    monkeypatch.setattr(doctor_report, "DNS_SECONDS", 0.1)
    table = "time: 2026 host: attic-7.lab.example.org rank: 1 on attic-7"
    assert anonymous(table) == "time: 2026 host: HOST.lab.example.org rank: 1 on HOST"  # no answer yet
    answers.set()
    while len(doctor_report._full_names("attic-7")) == 0:
        time.sleep(0.01)
    assert anonymous(table) == "time: 2026 host: HOST rank: 1 on HOST" and asked == ["attic-7"]


def test_no_gpu_can_be_recognized(tmp_path):
    """Its UUID is in what nvidia-smi says, in torch's GPUs and in CUDA_VISIBLE_DEVICES."""
    bare, other = "1A2B3C4D-0000-1111-2222-33445566778a", "1a2b3c4d-0000-1111-2222-33445566778b"
    facts = machine(
        gpus=[replace(GPU, uuid=bare.lower())],
        driver=[{"uuid": f"GPU-{bare}"}, {"uuid": f"GPU-{other}"}],
        smi=(f"0, H100, GPU-{bare}\n1, H100, GPU-{other}\n", ""),
        topology=f"\tGPU0\n{bare}\t{other}\n",  # JSON has a letter before each
        variables={"CUDA_VISIBLE_DEVICES": f"MIG-{other},MIG-GPU-{bare}/1/0"},
    )
    path = tmp_path / "doctor.json"
    Report(path, {}, facts).close("complete")
    found = written(path)["facts"]
    assert "1a2b3c4d" not in path.read_text().lower()
    assert {each["uuid"] for each in found["gpus"]} < {"UUID-1", "UUID-2"}
    assert {each["uuid"] for each in found["driver"]} == {"GPU-UUID-1", "GPU-UUID-2"}
    assert found["variables"]["CUDA_VISIBLE_DEVICES"].startswith("MIG-UUID-")
    assert anonymous(f"GPU-{bare}, {bare}, GPU-{other}") == "GPU-UUID-1, UUID-1, GPU-UUID-2"


def test_a_user_without_a_home_has_a_report(monkeypatch):
    """As of docker run --user 1234, which no list of users has."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError, as of an unknown user
    assert anonymous("12 GB are free") == "12 GB are free"


def test_a_failed_check_has_the_end_of_the_ranks_log(tmp_path, monkeypatch):
    log = tmp_path / "backend.log"
    log.write_text("a" * status.LOG_BYTES + "NCCL WARN Call to ibv_reg_mr failed")
    monkeypatch.setattr(status, "LOGS", [log])
    found = doctor_report.with_log(Finding("methods", "problem", "it ended", {"traceback": "..."}))
    assert found.values["log"].endswith("ibv_reg_mr failed") and len(found.values["log"]) == status.LOG_BYTES
    assert doctor_report.with_log(FOUND) is FOUND


def test_what_is_to_be_copied_is_not_broken():
    path = "/opt/" + "a-long-folder/" * 9 + "bin/python"
    lines = doctor.in_lines(
        "problem  packages  ", f"run: {path} -m pip install --upgrade comfy-kitchen"
    ).split("\n")
    assert len(lines) > 1 and any(line.split() == [path] for line in lines)
    text = " ".join(f"word {count} --shm-size=8g" for count in range(20))
    assert "-" not in {line[-1] for line in doctor.in_lines("ok ", text).split("\n")}
