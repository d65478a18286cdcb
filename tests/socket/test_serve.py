"""scripts/serve.py: a backend that somebody starts, asks and stops from a terminal. Its other commands run in
this process, since the imports of one of their own would take seconds."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from backend.cli import __main__ as cli
from backend.cli import start, status
from backend.client import pool
from backend.client.machines.machines import Machines
from backend.config import ParallelConfig
from backend.protocol import Report
from demo import shapes

ROOT = Path(__file__).parents[2]
TOKEN = "5" * 64
#: Also where other processes want the machine.
PATIENCE = 300


@pytest.fixture
def place(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "token").chmod(0o600)
    return tmp_path


def command(place: Path, name: str, *options: str) -> list[str]:
    where = ["--address", f"unix:{place}/s", "--token-file", str(place / "token")]
    return [name, *where, *options]


@pytest.fixture
def run(place, capsys, monkeypatch):
    """run(command, *options) -> its output; ``fails``: what it says where it ends with 1."""
    monkeypatch.setattr(pool, "_folders", set())

    def run_command(name: str, *options: str, fails: bool = False) -> str:
        code = cli.main(command(place, name, *options))
        found = capsys.readouterr()
        assert code == fails, found.err
        return found.err if fails else found.out

    return run_command


def request_file(place: Path) -> str:
    """A request for the demo model."""
    context, pooled = shapes.encode_prompt("a red circle")
    save_file({"c_crossattn": context, "y": pooled}, place / "prompt.safetensors")
    request = {"model": str(ROOT / "demo/shapes-flux"), "positive": "prompt.safetensors", "steps": 2}
    (place / "request.json").write_text(json.dumps(request | {"latent": [16, 16, 16], "out": "o.latent"}))
    return str(place / "request.json")


@pytest.fixture
def served(place):
    options = ["--config", json.dumps({"device": "cpu"}), "--models", str(ROOT / "demo")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    serve = [sys.executable, str(ROOT / "scripts/serve.py")]
    with subprocess.Popen([*serve, *command(place, "start", *options)], **pipes) as process:
        assert f" on cpu at unix:{place}/s, log " in process.stdout.readline()
        yield process
        process.terminate()


def test_status_sample_bench_and_stop(place, served, run):
    found = json.loads(run("status"))
    assert found["device"] == "cpu" and found["running"] == "" and found["waiting"] == 0
    assert found["ranks"][0]["resident_bytes"] > 1 << 20
    check_prometheus(run("status", "--prometheus"), {"parallel_dit_waiting": 0, "parallel_dit_models": 0})
    request = request_file(place)
    assert run("sample", request).startswith(f"{place}/o.latent: ")
    assert load_file(place / "o.latent")["latent_tensor"].shape == (1, 16, 16, 16)
    found = [json.loads(line) for line in run("bench", request, "--rounds", "2").splitlines()]
    assert found[0]["device"] == "cpu" and found[0]["round_trip_ms_least"] <= found[0]["round_trip_ms"]
    assert found[1]["steps"] == 2 and found[1]["latent"] == [1, 16, 16, 16]
    assert 0 < found[1]["seconds_least"] <= found[1]["seconds"] <= found[1]["seconds_most"]
    wanted = 'parallel_dit_answered_total{kind="Sample"}'
    # one of sample, and of bench one to fill caches and two that are measured
    check_prometheus(run("status", "--prometheus"), {wanted: 4, "parallel_dit_models": 1})
    assert run("stop") == ""
    assert served.wait(PATIENCE) == 0 and not (place / "s").exists()
    assert "no backend listens at unix:" in run("status", fails=True)


def check_prometheus(text: str, values: dict[str, float]):
    """Every line is a comment or a metric with its number, and these are among them."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, value in lines}
    assert all(name.startswith("parallel_dit_") and value >= 0 for name, value in found.items())
    assert values.items() <= found.items()


def test_a_backend_that_ends_by_itself_ends_with_an_error(place, served, run):
    """As systemd wants it, to start it again: its socket is in nobody's way."""
    os.kill(json.loads(run("status"))["ranks"][0]["pid"], signal.SIGKILL)
    assert served.wait(PATIENCE) == 1
    assert "rank 0 was killed by SIGKILL" in served.stderr.read()
    assert not (place / "s").exists()


def test_metrics_have_prometheus_form():
    ranks = [
        {"rank": r, "machine": 0, "pid": 7, "weight_bytes": 10 + r, "resident_bytes": 20 + r} for r in (0, 1)
    ]
    text = status.metrics(Report(9.5, {"a": "/a"}, ranks, "Sample", 1.5, 2, {"Load": 3}, 'no "x"\nin C:\\m'))
    assert "# TYPE parallel_dit_answered_total counter" in text
    assert 'parallel_dit_answered_total{kind="Load"} 3' in text
    assert 'parallel_dit_rank_weight_bytes{rank="1"} 11' in text
    assert 'parallel_dit_last_error_info{error="no \\"x\\"\\nin C:\\\\m"} 1' in text
    check_prometheus(text, {"parallel_dit_waiting": 2, "parallel_dit_up_seconds": 9.5})


def test_a_stale_socket_is_removed_and_a_live_one_is_not(place):
    path = place / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert start.somebody_listens(f"unix:{path}") and path.exists()
    assert not start.somebody_listens(f"unix:{path}") and not path.exists()


def test_a_second_backend_at_an_address_is_refused(place, run):
    """It would take the first one's clients for its own, and end the first one with itself."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        listener.listen()
        assert "listens at unix:" in run("start", "--config", '{"device": "cpu"}', fails=True)


def test_a_number_of_gpus_is_no_configuration_of_ranks(run):
    assert 'like {"ulysses_degree": 2}' in run("start", "--config", '{"gpus": 2}', fails=True)


def test_gpus_without_a_rank_are_said_of_each_machine(monkeypatch, capsys):
    """Not of the ranks of all machines."""
    monkeypatch.setattr(start.torch.cuda, "device_count", lambda: 8)
    machines = Machines(2, 1, "10.0.0.1:29500", "lo")
    process = SimpleNamespace(machines=machines, running=False, ended_as_asked=True, log="/l")
    assert start.served(process, ParallelConfig(ulysses_degree=4), "cuda") == 0
    assert "started, on cuda (2 of 8 GPUs), log /l" in capsys.readouterr().out


def test_ctrl_c_is_no_traceback(place, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "BackendClient", interrupted)
    assert cli.main(command(place, "status")) == 130


def test_paths_do_not_depend_on_the_folder(place, monkeypatch):
    """Ranks run in a folder of their own, and a unit file has no shell that knows ~."""
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.chdir(place)
    options = start._options(["--address", "unix:~/s", "--models", "models", "~/more", "/most"])
    assert options.address == f"unix:{place}/s"
    assert options.models == [f"{place}/models", f"{place}/more", "/most"]


def test_a_token_that_others_can_read_is_refused(place, run):
    (place / "token").chmod(0o644)
    assert "chmod 600" in run("status", fails=True)
