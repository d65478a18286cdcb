"""Launching, reusing and losing a backend, as the nodes and the scripts do it; no ComfyUI needed."""

import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from backend.client import client, pack_version, pool
from backend.client.auto import preflight, probe_process
from backend.client.auto.model_choice import ModelChoice
from backend.client.client import HandshakeError
from backend.client.exit_report import links_hint
from backend.client.launching import launcher, rank_environment
from backend.client.launching.agent_command import launch_command
from backend.client.launching.launcher import BackendProcess
from backend.config import ConfigError, ParallelConfig
from backend.protocol import BackendError, Failure, RefusedError, Status, framing

TWO_RANKS = ParallelConfig(ulysses_degree=2, device="cpu")


@pytest.fixture(autouse=True)
def end_backends():
    yield
    pool.close_all()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return str(tiny.write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-flux.safetensors"))


def wait_until_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_every_flag_is_one_that_torchrun_knows():
    from torch.distributed.run import get_args_parser

    command = launch_command(TWO_RANKS, "unix:/x/backend.sock", Path("/x"))
    args = get_args_parser().parse_args(command[3:])
    assert args.training_script == "backend.worker" and args.nproc_per_node == "2"
    assert args.rdzv_endpoint == "/x/rdzv" and "store_type=file" in args.rdzv_conf and not args.standalone
    assert args.training_script_args[:2] == ["--address", "unix:/x/backend.sock"]


def test_config_that_cannot_run_launches_nothing():
    with pytest.raises(ConfigError, match="at most 16"):
        pool.backend_for(ParallelConfig(ulysses_degree=17, device="cpu"))
    assert not pool._backends


def test_address_without_token(monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_ADDRESSES", "unix:/run/b, tcp:127.0.0.1:1")
    monkeypatch.delenv("PARALLEL_DIT_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="has no PARALLEL_DIT_TOKEN"):
        pool.backend_for(ParallelConfig(address="tcp:127.0.0.1:1"))
    monkeypatch.setenv("PARALLEL_DIT_TOKEN", "x")
    with pytest.raises(BackendError, match="No backend listens at tcp:127.0.0.1:1"):
        pool.backend_for(ParallelConfig(address="tcp:127.0.0.1:1"))


def test_backend_is_reused_until_its_topology_changes(checkpoint):
    lines = []
    first = pool.backend_for(TWO_RANKS, show=lines.append)
    seconds = [int(re.fullmatch(r"starting 2 ranks, (\d+) s(: [12] of 2 ready)?", line)[1]) for line in lines]
    assert re.fullmatch(r"starting 2 ranks, \d+ s", lines[0]) and seconds == sorted(seconds)
    loaded = first.load(checkpoint)
    assert loaded.family == "flux" and first.load(checkpoint).model == loaded.model
    assert pool.backend_for(ParallelConfig(ulysses_degree=2, device="cpu", attention="sdpa")) is first
    with pytest.raises(RefusedError, match="nowhere"):
        first.load("/nowhere.safetensors")
    assert first.load(checkpoint, keep=set()).model == loaded.model  # refused, yet still there
    folder, pids = first.process.folder, first.welcome.pids
    second = pool.backend_for(ParallelConfig(device="cpu"))
    assert second is not first and second.alive() and not first.alive()
    wait_until_gone(pids)
    assert not folder.exists()


def test_weights_that_nobody_keeps_make_room(checkpoint):
    backend = pool.backend_for(ParallelConfig(device="cpu"))
    default = backend.load(checkpoint)
    half = backend.load(checkpoint, "bf16", keep={ModelChoice(checkpoint)})
    assert set(backend.models.values()) == {default.model, half.model}
    backend.load(checkpoint, "bf16", keep=set())
    assert list(backend.models.values()) == [half.model]
    assert backend.unload((checkpoint, "bf16", "auto"))
    assert backend.client.request(Status()).models == {}  # nothing is parked on the CPU
    assert backend.load(checkpoint, "bf16").model == half.model


def test_giving_up_during_a_load_ends_the_backend(checkpoint, monkeypatch):
    class Interrupt(BaseException):
        pass

    def interrupt():
        raise Interrupt

    backend = pool.backend_for(ParallelConfig(device="cpu"))
    monkeypatch.setattr(
        client, "POLL_SECONDS", 0.0
    )  # a tiny checkpoint is loaded before anybody looks up otherwise
    with pytest.raises(Interrupt):
        backend.load(checkpoint, check=interrupt)
    assert not backend.alive()
    wait_until_gone(backend.welcome.pids)


def test_a_backend_that_cannot_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend/worker.py").write_text("import no_such_package")
    monkeypatch.setattr(rank_environment, "PACK", tmp_path)
    process = BackendProcess(ParallelConfig(device="cpu"), "cpu")
    try:
        with pytest.raises(
            BackendError,
            match="rank 0 failed with ModuleNotFoundError: No module named 'no_such_package'"
            ".*its log is .*backend.log",
        ):
            process.wait_ready()
    finally:
        process.close()


def test_an_agent_that_ends_before_it_is_told_anything_is_named(tmp_path, monkeypatch):
    """Its end of the pipe is closed by then; the error is its own, and none of the pipe."""
    start = BackendProcess._start_agent

    def ended(process, *given):
        agent = start(process, *given)
        agent.wait()
        return agent

    command = [sys.executable, "-c", "raise SystemExit(1)"]
    monkeypatch.setattr(launcher, "launch_command", lambda *_: command)
    monkeypatch.setattr(BackendProcess, "_start_agent", ended)
    process = BackendProcess(TWO_RANKS, "cpu")
    try:
        with pytest.raises(BackendError, match="its launcher exited with code 1"):
            process.wait_ready()
    finally:
        process.close()


def test_a_start_takes_as_long_as_ranks_become_ready(tmp_path, monkeypatch):
    """Each of four takes 200 s, as on a cold network disk; 300 s without another one are the end."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + 10))
    monkeypatch.setattr(launcher, "time", clock)
    process = BackendProcess.__new__(BackendProcess)
    process.folder, process.log, process._ranks, process._link = tmp_path, tmp_path / "log", 4, None
    process._private = SimpleNamespace(keep=lambda: None)
    process.watch = SimpleNamespace(limit_started=lambda: None)
    process._is_on_gpus = True
    starts = 4

    def connect(check):
        for rank in range(min(starts, int(now[0] // 200))):
            (tmp_path / f"{launcher.STORE}.ready-{rank}").touch()
        return "client" if now[0] > 1000 and starts == 4 else None

    monkeypatch.setattr(process, "_try_to_connect", connect)
    assert process.wait_ready() == "client"
    for ready in tmp_path.glob("*ready*"):
        ready.unlink()
    starts, now[0] = 2, 0.0
    with pytest.raises(BackendError, match="not ready after 300 s: 2 of 4 ready; the reason"):
        process.wait_ready()
    assert 700 <= now[0] <= 730
    process._ranks, now[0] = 2, 0.0
    with pytest.raises(
        BackendError, match="2 of 2 ready and GPUs that .*doctor.py --full, run as this user.*log"
    ):
        process.wait_ready()


@pytest.mark.parametrize("gpus", [False, True])
def test_ranks_of_several_machines_may_wait_for_their_own_gpus(gpus):
    hint = links_hint(True, gpus)
    assert "other machines are not ready" in hint and ("doctor.py --full" in hint) is gpus
    assert not links_hint(False, False)


@pytest.mark.parametrize("code, gave_up", [(None, ""), (None, "it was not ready"), (0, "")])
def test_other_machines_hear_that_nobody_asked_for_an_end(tmp_path, monkeypatch, code, gave_up):
    """Before the ranks end with 0, as where a client has asked: a service starts them again after a failure
    alone."""
    heard = []
    link = SimpleNamespace(broadcast=lambda **line: heard.append(line), close=lambda why: heard.append(why))
    process = BackendProcess.__new__(BackendProcess)
    agent = SimpleNamespace(returncode=code, poll=lambda: agent.returncode)

    def ended(seconds=None):
        agent.returncode = 0

    agent.wait = ended
    stub = SimpleNamespace(stop=lambda: None, silent=lambda _: "", close=lambda: None)
    client = SimpleNamespace(closed=False, send=lambda _: heard.append("shutdown"), hang_up=lambda: None)
    process._agent, process._link, process._client = agent, link, client
    process.watch = process.heartbeats = process._private = stub
    process._pipe = SimpleNamespace(closed=True, close=lambda: None)
    process._gave_up, process.silence, process._ended_elsewhere = gave_up, "", False
    process._end()
    said = [] if code == 0 else [{"left": gave_up or "it was told to end"}]
    assert heard == [*said, "shutdown", ""]


#: A rank 0 that refuses every client, as one of another version does.
REFUSING = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--address") + 1].removeprefix("unix:"))
listener.listen()
connection, _ = listener.accept()
connection.sendall({frame!r})
time.sleep(1000)
"""


def test_why_a_living_backend_lets_nobody_in_is_said(tmp_path, monkeypatch):
    """At once: it is no loss of the connection, whose cause would be waited for."""
    frame = b"".join(framing.encode(Failure("client and backend are of different versions; restart both.")))
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend/worker.py").write_text(REFUSING.format(frame=frame))
    monkeypatch.setattr(rank_environment, "PACK", tmp_path)
    process = BackendProcess(ParallelConfig(device="cpu"), "cpu")
    try:
        with pytest.raises(HandshakeError, match="different versions; restart both"):
            process.wait_ready()
    finally:
        process.close()


def test_nothing_is_started_of_an_updated_pack(monkeypatch):
    """ComfyUI keeps what it has imported; a launch, a preflight and a probe would be of another one."""
    monkeypatch.setattr(pack_version, "IMPORTED", "of yesterday")
    monkeypatch.setattr(preflight, "_reader", None)
    starts = (
        lambda: BackendProcess(ParallelConfig(device="cpu"), "cpu"),
        lambda: preflight.read_shape(ModelChoice("/m.safetensors"), "cpu", [0]),
        lambda: probe_process.run(["false"], {}, lambda: None),
    )
    for start in starts:
        with pytest.raises(BackendError, match="The pack was updated .*; restart ComfyUI"):
            start()


def test_a_backend_that_is_never_ready(tmp_path, monkeypatch):
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend/worker.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(rank_environment, "PACK", tmp_path)
    monkeypatch.setattr(launcher, "READY_SECONDS", 3)
    process = BackendProcess(ParallelConfig(device="cpu"), "cpu")
    try:
        with pytest.raises(BackendError, match="not ready after 3 s"):
            process.wait_ready()
    finally:
        process.close()
    assert not process.running
