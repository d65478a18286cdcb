"""scripts/serve.py: a backend that somebody starts, asks and stops from a terminal."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from backend.cli import start, status
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
    return [sys.executable, str(ROOT / "scripts/serve.py"), name, *where, *options]


def run(place: Path, name: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(place, name, *options), capture_output=True, text=True, timeout=PATIENCE)


def bench_request(place: Path) -> list[str]:
    """Options of bench for two samples of the demo model."""
    context, pooled = shapes.encode_prompt("a red circle")
    save_file({"c_crossattn": context, "y": pooled}, place / "prompt.safetensors")
    request = {"model": str(ROOT / "demo/shapes-flux"), "positive": "prompt.safetensors", "steps": 2}
    (place / "request.json").write_text(json.dumps(request | {"latent": [16, 16, 16], "out": "o.latent"}))
    return [str(place / "request.json"), "--rounds", "2"]


@pytest.fixture
def served(place):
    options = ["--config", json.dumps({"device": "cpu"}), "--models", str(ROOT / "demo")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(place, "start", *options), **pipes) as process:
        assert f" on cpu at unix:{place}/s, log " in process.stdout.readline()
        yield process
        process.terminate()


def test_status_and_stop(place, served):
    found = json.loads(run(place, "status").stdout)
    assert found["device"] == "cpu" and found["running"] == "" and found["waiting"] == 0
    assert found["ranks"][0]["resident_bytes"] > 1 << 20
    assert "parallel_dit_waiting 0\n" in run(place, "status", "--prometheus").stdout
    found = [json.loads(line) for line in run(place, "bench", *bench_request(place)).stdout.splitlines()]
    assert found[0]["device"] == "cpu" and found[0]["round_trip_ms_least"] <= found[0]["round_trip_ms"]
    assert found[1]["steps"] == 2 and found[1]["latent"] == [1, 16, 16, 16]
    assert 0 < found[1]["seconds_least"] <= found[1]["seconds"] <= found[1]["seconds_most"]
    report = json.loads(run(place, "status").stdout)
    assert report["answered"]["Sample"] == 3 and report["ranks"][0]["machine"] == 0  # one to fill caches
    assert run(place, "stop").returncode == 0
    assert served.wait(PATIENCE) == 0 and not (place / "s").exists()
    assert "refused" in run(place, "status").stderr or "No such file" in run(place, "status").stderr


def test_a_backend_that_ends_by_itself_ends_with_an_error(place, served):
    """As systemd wants it, to start it again: its socket is in nobody's way."""
    os.kill(json.loads(run(place, "status").stdout)["ranks"][0]["pid"], signal.SIGKILL)
    assert served.wait(PATIENCE) == 1
    assert "rank 0 was killed by SIGKILL" in served.stderr.read()
    assert not (place / "s").exists()


def test_metrics_have_prometheus_form():
    ranks = [
        {"rank": r, "machine": 0, "pid": 7, "weight_bytes": 10 + r, "resident_bytes": 20 + r} for r in (0, 1)
    ]
    text = status.metrics(Report(9.5, {"a": "/a"}, ranks, "Sample", 1.5, 2, {"Load": 3}, ""))
    assert "# TYPE parallel_dit_answered_total counter" in text
    assert 'parallel_dit_answered_total{kind="Load"} 3' in text
    assert 'parallel_dit_rank_weight_bytes{rank="1"} 11' in text
    for line in text.splitlines():
        assert line.startswith("#") or (line.startswith("parallel_dit_") and float(line.split()[-1]) >= 0)


def test_a_stale_socket_is_removed_and_a_live_one_is_not(place):
    path = place / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        start.remove_stale(f"unix:{path}")
        assert path.exists()
    start.remove_stale(f"unix:{path}")
    assert not path.exists()


def test_a_token_that_others_can_read_is_refused(place):
    (place / "token").chmod(0o644)
    assert "chmod 600" in run(place, "status").stderr
