"""Launching, reusing and losing a backend, as the nodes and the scripts do it; no ComfyUI needed."""

import os
import platform
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import faults
import forking
import pytest
import tiny

from backend.client import client, pool, private_folder, rank_environment
from backend.client.agent_command import launch_command
from backend.client.launcher import BackendProcess
from backend.client.rank_environment import PACK, sanitized_environment
from backend.config import ConfigError, ParallelConfig
from backend.protocol import BackendError, RefusedError, Status

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


def test_environment_drops_other_launchers_settings():
    parent = {
        "PATH": "/bin",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "ROLE_RANK": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "NCCL_P2P_DISABLE": "1",
        "PYTHONPATH": "/other",
        "PARALLEL_DIT_TOKEN": "of a backend elsewhere",
        "PARALLEL_DIT_ADDRESSES": "tcp:elsewhere:1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "DIFFUSERS_ATTN_BACKEND": "flash",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    }
    env = sanitized_environment(parent, TWO_RANKS, "cpu")
    assert not {
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "ROLE_RANK",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PARALLEL_DIT_TOKEN",
        "PARALLEL_DIT_ADDRESSES",
        "DIFFUSERS_ATTN_BACKEND",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
    } & set(env)
    assert env["PATH"] == "/bin" and env["NCCL_P2P_DISABLE"] == "1"
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "lo" and env["NCCL_RAS_ENABLE"] == "0"
    assert env["PYTHONPATH"] == f"{PACK}{os.pathsep}/other" and env["CUDA_VISIBLE_DEVICES"] == ""
    assert int(env["OMP_NUM_THREADS"]) >= 1


@pytest.mark.parametrize(
    "theirs, expected",
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,backend:cudaMallocAsync"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_the_allocator_leaves_no_gaps_unless_the_user_has_set_it(theirs, expected, monkeypatch):
    """ComfyUI sets the backend for its own process."""
    monkeypatch.setattr(sys, "platform", "linux")
    assert sanitized_environment(theirs, TWO_RANKS, "cuda")["PYTORCH_CUDA_ALLOC_CONF"] == expected
    assert "PYTORCH_CUDA_ALLOC_CONF" not in sanitized_environment(theirs, TWO_RANKS, "cpu")


def test_the_allocator_is_as_usual_on_wsl(monkeypatch):
    """Where segments that grow fail under many drivers; who sets them has them."""
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in sanitized_environment({}, TWO_RANKS, "cuda")
    theirs = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert theirs.items() <= sanitized_environment(theirs, TWO_RANKS, "cuda").items()


def test_values_of_nccl_that_somebody_set_are_kept():
    theirs = {"NCCL_SOCKET_IFNAME": "=eth1", "NCCL_RAS_ENABLE": "1"}
    assert theirs.items() <= sanitized_environment(theirs, TWO_RANKS, "cuda").items()


@pytest.mark.parametrize(
    "visible, gpus, expected",
    [
        (None, "", "0,1"),
        (None, "3,1", "3,1"),
        ("4,5,6", "", "4,5"),
        ("4,5,6", "2,0", "6,4"),
        ("GPU-a, GPU-b", "", "GPU-a,GPU-b"),
    ],
)
def test_gpus_are_picked_among_the_visible_ones(visible, gpus, expected):
    parent = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    config = ParallelConfig(ulysses_degree=2, gpus=gpus)
    assert sanitized_environment(parent, config, "cuda")["CUDA_VISIBLE_DEVICES"] == expected


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


def test_backend_is_reused_until_its_topology_changes(checkpoint, monkeypatch):
    forking.launch_really(monkeypatch)
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
    half = backend.load(checkpoint, "bf16", keep={(checkpoint, "default", "auto")})
    assert set(backend.models.values()) == {default.model, half.model}
    backend.load(checkpoint, "bf16", keep=set())
    assert list(backend.models.values()) == [half.model]
    assert backend.unload(checkpoint, "bf16")
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
            process.wait_ready(60)
    finally:
        process.close()


def test_a_backend_that_is_never_ready(tmp_path, monkeypatch):
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend/worker.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(rank_environment, "PACK", tmp_path)
    process = BackendProcess(ParallelConfig(device="cpu"), "cpu")
    try:
        with pytest.raises(BackendError, match="not ready after 3 s"):
            process.wait_ready(3)
    finally:
        process.close()
    assert not process.running


def test_a_socket_fits_below_a_folder_whose_name_has_more_bytes_than_characters(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        place = Path(short) / ("é" * 40)
        place.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(place))
        folder = private_folder.PrivateFolder()
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder.path / "backend.sock"))
        finally:
            folder.close()


#: A launcher that says its folder and waits for its death; ``named`` has it name its log first.
LAUNCHER = """
import sys; sys.path.insert(0, {root!r})
import time
from backend.client.private_folder import PrivateFolder
folder = PrivateFolder()
if {named}: folder.keep()
print(folder.path, flush=True)
time.sleep(600)
"""


@contextmanager
def waiting_launcher(place: Path, named: bool = False) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A process with a private folder in ``place``, killed in the end."""
    code = LAUNCHER.format(root=str(PACK), named=named)
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_folder_of_a_killed_launcher_is_removed(tmp_path, end):
    with waiting_launcher(tmp_path) as (process, folder):
        assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "ranks").mkdir()
        private_folder.sweep(tmp_path)
        assert (folder / "ranks").exists()  # it lives
        process.send_signal(end)
        process.wait()
        private_folder.sweep(tmp_path)
        assert not folder.exists()


def test_a_log_that_was_named_stays_for_a_day(tmp_path):
    with waiting_launcher(tmp_path, named=True) as (process, folder):
        process.kill()
        process.wait()
        private_folder.sweep(tmp_path)
        assert folder.exists()
        yesterday = time.time() - private_folder.KEEP_SECONDS - 60
        os.utime(folder / private_folder.LOCK, (yesterday, yesterday))
        private_folder.sweep(tmp_path)
        assert not folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_log_is_named_on_a_full_disk(tmp_path, monkeypatch):
    with faults.small_disk(tmp_path / "disk") as place:
        monkeypatch.setattr("tempfile.tempdir", str(place))
        folder = private_folder.PrivateFolder()
        faults.fill(place)
        folder.keep()
        folder.close()
        private_folder.sweep(place)
        assert (folder.path / private_folder.LOCK).stat().st_size > 0


def test_folders_that_are_not_a_dead_launchers_stay(tmp_path):
    """Another user's, one that others can enter, a link, a linked lock, one without a lock."""
    place = tmp_path / "place"
    outside = tmp_path / "outside"
    for folder in (place, outside, *(place / f"parallel-dit-{name}" for name in ("open", "none", "lock"))):
        folder.mkdir(mode=0o700)
    (place / "parallel-dit-open").chmod(0o755)
    for folder in (outside, place / "parallel-dit-open"):
        (folder / private_folder.LOCK).touch()
    (place / "parallel-dit-link").symlink_to(outside)
    (place / "parallel-dit-lock" / private_folder.LOCK).symlink_to(outside / private_folder.LOCK)
    (place / "parallel-dit-file").touch()
    before = sorted(place.iterdir())
    private_folder.sweep(place)
    assert sorted(place.iterdir()) == before and (outside / private_folder.LOCK).exists()


def test_a_folder_of_another_user_stays(tmp_path, monkeypatch):
    folder = tmp_path / "parallel-dit-x"
    folder.mkdir(mode=0o700)
    (folder / private_folder.LOCK).touch()
    own = os.getuid()
    monkeypatch.setattr(private_folder.os, "getuid", lambda: own + 1)
    private_folder.sweep(tmp_path)
    assert folder.exists()
    monkeypatch.undo()
    private_folder.sweep(tmp_path)
    assert not folder.exists()
