"""One backend on two hosts: network namespaces on this machine, with processes of their own (hosts.py)."""

import os
import re
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import forking
import hosts
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import error_in_std, golden_request, relative, to_vae_units, write_checkpoint

from backend import protocol
from backend.client.client import BackendClient
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())
TOKEN = "7" * 64
PATIENCE = 600
#: Steps that outlast what a test does to them.
LONG = 100
#: Largest distance to ComfyUI's latent, in its standard deviations.
EXACT = 1e-4
#: A machine is silent after so many seconds (tests/socket/test_machine_link.py has the default), and this is
#: told after so many at most, also on a busy machine.
SILENT, TOLD = 4, 9.0
#: Ranks -> degrees that one start of them runs, one after the other; what is slowest changes last.
RUNS = {
    2: [{"cfg_degree": 2}, {"pipefusion_degree": 2}],
    4: [
        {"ulysses_degree": 2, "cfg_degree": 2},
        {"ulysses_degree": 2, "pipefusion_degree": 2},
        {"tensor_parallel_degree": 2, "cfg_degree": 2},
    ],
}


def save(path: Path, note: str) -> Path:
    """Write the tiny model with a note in its header."""
    state = load_file(write_checkpoint(path.with_name("flux-tiny.safetensors")))
    save_file(state, path, {"note": note})
    return path


class Served:
    """A backend on both hosts, and a client of it on neither."""

    def __init__(self, folder: Path, config: dict, **env: str):
        folder.chmod(0o700)
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        self.folder = folder
        self.checkpoint = str(write_checkpoint(folder / "flux-tiny.safetensors"))
        self.hosts = hosts.Hosts()
        try:
            given = ({"device": "cpu", **config}, "--models", str(folder))
            self.differs = save(folder / "differs.safetensors", "a")
            own = {"FILE": str(self.differs), "OTHER": str(save(folder / "other.safetensors", "b"))}
            given_to = (env, env | own)
            self.processes = [self.hosts.serve(i, folder, *given, **own) for i, own in enumerate(given_to)]
            head = self.processes[0].stdout
            assert head is not None
            self.report = head.readline()
            assert "ranks on cpu at" in head.readline(), self.ends()
            self.client = BackendClient(f"unix:{folder}/s", TOKEN)
            self.model = self.client.request(protocol.Load(self.checkpoint, "default", [], "auto")).model
        except BaseException:
            self.hosts.close()
            raise

    def request(self, steps: int = 6) -> protocol.Sample:
        sample = replace(golden_request("euler_simple", self.model)[0], num_pipeline_patch=1)
        if steps == 6:
            return sample
        return replace(sample, tensors={**sample.tensors, "sigmas": torch.linspace(1, 0, steps + 1)})

    def ends(self) -> list[tuple[int, str, str]]:
        """Exit status, last words and ranks left over of each host, once both have ended."""
        found = []
        for i, process in enumerate(self.processes):
            error = process.communicate(timeout=PATIENCE)[1]
            left = self.folder / f"left-{i}"
            found.append((process.returncode, error, left.read_text() if left.exists() else "not looked"))
        return found


@pytest.fixture
def serve(tmp_path):
    started = []

    def start(config: dict, **env: str) -> Served:
        started.append(Served(tmp_path, config, **env))
        return started[0]

    yield start
    for each in started:
        each.hosts.close()


def one_process(checkpoint: str) -> torch.Tensor:
    """What a single process samples."""
    engine = Engine(ParallelConfig(device="cpu"), mesh.single())
    engine.load("tiny", checkpoint, "default")
    return engine.sample(golden_request("euler_simple", "tiny")[0], Callbacks())[0]


def check_doors(backend: Served):
    """On the network torchrun's store alone listens on every interface, as docs/security.md has it; ranks and
    launchers on the cable."""
    first, second = (backend.hosts.listening(i) for i in (0, 1))
    assert {port for address, port in first if address == "any"} == {hosts.PORT}
    assert (hosts.ADDRESSES[0], hosts.PORT + 1) in first
    for found, own in ((first, hosts.ADDRESSES[0]), (second, hosts.ADDRESSES[1])):
        assert {address for address, _ in found} - {"any"} == {own}
    assert "any" not in {address for address, _ in second}


@pytest.mark.parametrize("ranks", RUNS)
def test_methods_across_hosts_are_exact(ranks, serve, monkeypatch):
    """And a client that says Shutdown ends both hosts, with nothing left. Two ranks and their agents are
    processes that import everything themselves, as users start them."""
    if ranks == 2:
        forking.launch_really(monkeypatch)
    backend = serve(RUNS[ranks][0])
    check_doors(backend)
    alone = one_process(backend.checkpoint)
    _, golden = golden_request("euler_simple")
    for degrees in RUNS[ranks]:
        config = ParallelConfig(device="cpu", **degrees)
        before = backend.hosts.sent()
        backend.client.request(protocol.Arrange(asdict(config)))
        backend.client.request(protocol.Load(backend.checkpoint, "default", [], "auto"))
        samples = backend.client.sample(backend.request()).tensors["samples"]
        assert relative(samples, alone) <= 1e-5, degrees
        assert error_in_std(to_vae_units(samples), golden) <= EXACT, degrees
        # bodies go by broadcast, and what crosses is of the method: both over the cable
        assert backend.hosts.sent() - before > golden.numel() * 4, degrees
    with pytest.raises(
        protocol.RefusedError, match=r"ranks? (1|2, 3): .*is another file on this rank's machine"
    ):
        backend.client.request(protocol.Load(str(backend.differs), "default", [], "auto"))
    machines = [rank["machine"] for rank in backend.client.request(protocol.Status()).ranks]
    assert machines == [0] * (ranks // 2) + [1] * (ranks // 2)
    inside = "inside a machine ulysses_degree 2; " if ranks == 4 else ""
    here = "2 ranks" if ranks == 4 else "1 rank"
    assert backend.report == f"2 machines of {here} each: {inside}across machines cfg_degree 2.\n"
    backend.client.send(protocol.Shutdown())
    assert backend.ends() == [(0, "", ""), (0, "", "")]


def test_a_cut_cable_is_told_on_both_sides_and_nothing_is_left(serve):
    backend = serve({"cfg_degree": 2}, PARALLEL_DIT_SILENT_SECONDS=str(SILENT))
    cut: list[float] = []

    def cut_once(_):
        if not cut:
            cut.append(time.monotonic())
            backend.hosts.cut()

    with pytest.raises(
        protocol.BackendError, match=f"machine 1 .* has been silent for {SILENT} s .its link is cut"
    ):
        backend.client.sample(backend.request(LONG), cut_once)
    assert time.monotonic() - cut[0] <= TOLD
    for other, (code, error, left) in zip((1, 0), backend.ends(), strict=True):
        assert code == 1 and f"machine {other} (10.213.77." in error and left == ""
        assert f"has been silent for {SILENT} s" in error


def test_both_hosts_name_the_rank_that_was_killed(serve):
    backend = serve({"cfg_degree": 2})
    pids = [pid_here(backend, 1)]

    def kill(_):
        while pids:
            os.kill(pids.pop(), signal.SIGKILL)

    with pytest.raises(protocol.BackendError):
        backend.client.sample(backend.request(LONG), kill)
    for code, error, left in backend.ends():
        assert code == 1 and "rank 1 on machine 1 (10.213.77.2) was killed by SIGKILL" in error and left == ""


def pid_here(backend: Served, rank: int) -> int:
    """The process id outside its "host" of a rank, of which each has one."""
    inode = os.stat(f"/run/netns/{backend.hosts.names[rank]}").st_ino
    own = str(backend.client.welcome.pids[rank])
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "ns/net") == f"net:[{inode}]":
                numbers = re.search(r"NSpid:(.*)", (entry / "status").read_text())
                found += [int(entry.name)] if numbers and numbers[1].split()[1:] == [own] else []
        except OSError:
            continue  # it has just ended
    assert len(found) == 1
    return found[0]
