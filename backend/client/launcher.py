"""Starts one backend on this machine and ends it: a torchrun agent, its ranks, and the private folder of
their socket and logs. Imports neither ComfyUI nor torch.distributed."""

import atexit
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from ..config import ParallelConfig
from ..protocol import BackendError, Shutdown
from .client import BackendClient
from .exit_report import first_failure
from .private_folder import PrivateFolder

PACK = Path(__file__).resolve().parents[2]
#: Starting takes seconds on a warm disk and minutes on a cold network one.
READY_SECONDS = 300.0
#: Where the ranks meet, in their private folder; each leaves STORE.ready-RANK there (backend/start.py).
STORE = "ranks-store"
#: After a rank has ended, torchrun needs this long at most to end the others and to write why.
EXIT_REPORT_SECONDS = 8.0
#: What another launcher, or ComfyUI for its own process, may have set and a fresh group must not inherit.
_DROPPED = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
    # of this process as a client of other backends, not for those that it starts
    *("PARALLEL_DIT_TOKEN", "PARALLEL_DIT_ADDRESSES"),
}
_DROPPED_PREFIXES = ("ROLE_", "MASTER_", "TORCHELASTIC_")


def closed_doors(parent: dict) -> dict:
    """Return settings under which agent and ranks of one machine listen on no network.

    The agent opens no TCPStore for its ranks: they meet in a file (rendezvous_flags). gloo listens on
    loopback. NCCL finds its peers through a socket too, on the first network interface unless told; data
    still goes over NVLink, PCIe or shared memory. Its status service (RAS) would answer anybody on this
    machine: off. NCCL's two settings keep the values that ``parent`` has.
    """
    doors = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if sys.platform == "linux":
        doors["GLOO_SOCKET_IFNAME"] = "lo"
        doors["NCCL_SOCKET_IFNAME"] = parent.get("NCCL_SOCKET_IFNAME", "lo")
    doors["NCCL_RAS_ENABLE"] = parent.get("NCCL_RAS_ENABLE", "0")
    return doors


def sanitized_environment(parent: dict, config: ParallelConfig, device: str) -> dict:
    """Return the environment of agent and ranks: ``parent`` with our settings, no other launcher's."""
    env = {
        name: value
        for name, value in parent.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.world_size)))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACK), parent.get("PYTHONPATH")]))
    env["PYTHONUNBUFFERED"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""
    if device == "cuda":
        indices = config.gpu_indices
        visible = parent.get("CUDA_VISIBLE_DEVICES")  # this process may itself see a selection only
        names = visible.split(",") if visible else [str(i) for i in range(max(indices) + 1)]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[index].strip() for index in indices)
    env |= closed_doors(parent)
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"
    env["HF_HUB_OFFLINE"] = "1"
    return env


def rendezvous_flags(folder: Path) -> list[str]:
    """Return torchrun's flags for an agent that keeps its state in a file of the private ``folder``.

    Its usual store is a TCP server on all interfaces that authenticates nobody, and the agent unpickles what
    lies in it: whoever reaches the port could run code. The heartbeat is rare, since the file only grows.
    """
    settings = "store_type=file,keep_alive_interval=3600"
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(folder / "rdzv"), "--rdzv-conf", settings]


def launch_command(
    config: ParallelConfig, address: str, folder: Path, models: Iterable[str] = ()
) -> list[str]:
    """Return the command line of the agent; the ranks' output goes to files under ``folder`` and through the
    agent's own. Everybody on this machine can read it: token and configuration go through the pipe. Files are
    loaded from below ``models`` alone."""
    agent = agent_command(config.world_size, folder)
    rank = ["-m", "backend.worker", "--address", address, "--store", str(folder / STORE)]
    return [*agent, *rank, "--parent-pipe", "--models", *models]


def agent_command(ranks: int, folder: Path) -> list[str]:
    """Return the command line of an agent of so many ranks, without what they run."""
    flags = {
        "--local-addr": "127.0.0.1",
        "--nproc-per-node": str(ranks),
        "--max-restarts": "0",
        "--monitor-interval": "0.1",
        "--log-dir": str(folder / "ranks"),
        "--tee": "3",
    }
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous_flags(folder), *chain(*flags.items())]


class ClosedError(BackendError):
    """We end the backend ourselves, as at the end of this process, while another thread still waits for it:
    no failure, and nothing to report."""


class _NotReady(Exception):
    """Ends wait_ready at its deadline, from inside a connection's own wait."""


class BackendProcess:
    """A backend that this process started and owns. Every rank inherits the read end of a pipe that only we
    hold open: token and configuration come through it, and ranks end when it closes, however we end."""

    def __init__(self, config: ParallelConfig, device: str, models: Iterable[str] = ()):
        """Start ranks on ``device``, "cuda" or "cpu", that may load files below the folders ``models``."""
        self.models = frozenset(models)
        self._private = PrivateFolder()
        self.folder = self._private.path
        self.log = self.folder / "backend.log"
        self.address = _free_address(self.folder)
        self._token = secrets.token_hex(32)
        self._client = None
        self._closing = False
        # the ranks see their own devices only, numbered from 0
        seen = replace(config, device=device, gpus="", address="")
        with open(self.log, "wb") as log:
            self._agent = subprocess.Popen(
                launch_command(config, self.address, self.folder, sorted(self.models)),
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=sanitized_environment(dict(os.environ), config, device),
                start_new_session=True,
            )
        # a line of a few hundred bytes fits into the pipe, whoever reads it and when (backend/start.py)
        line = json.dumps({"token": self._token, "config": asdict(seen)})
        assert self._agent.stdin is not None  # it was opened as a pipe
        self._pipe = self._agent.stdin
        self._pipe.write(line.encode() + b"\n")
        self._pipe.flush()
        atexit.register(self.close)

    def wait_ready(self, seconds: float = READY_SECONDS, check=lambda: None) -> BackendClient:
        """Return a client connected to rank 0, once every rank has joined. ``check()`` is called ten times a
        second and may raise to give up. Raises BackendError, which names the cause and the log, where the
        backend ends first or needs longer than ``seconds``."""
        deadline = time.monotonic() + seconds

        def wait_on():
            check()
            if time.monotonic() > deadline:
                raise _NotReady

        try:
            while (client := self._try_to_connect(wait_on)) is None:
                wait_on()
                time.sleep(0.1)
        except _NotReady:
            self._private.keep()
            raise BackendError(
                f"The backend was not ready after {seconds:.0f} s; the reason may be in its log, {self.log}."
            ) from None
        self._client = client
        return client

    def _try_to_connect(self, check) -> BackendClient | None:
        try:
            return BackendClient(self.address, self._token, check)
        except OSError:  # nobody listens yet, or nobody will
            if self.running:
                return None
            raise self.failure() from None
        except BackendError as error:
            raise self.failure() from error

    @property
    def ready_ranks(self) -> int:
        """How many ranks have imported everything and wait for the others."""
        return sum(1 for _ in self.folder.glob(f"{STORE}.ready-*"))

    @property
    def running(self) -> bool:
        return self._agent.poll() is None

    def failure(self) -> BackendError:
        """Return the error for a request that the backend has not answered: its failure cause, or ClosedError
        where we are ending it."""
        if self._closing:
            return ClosedError("The backend ends with the process that started it.")
        return BackendError(self.failure_cause())

    def failure_cause(self) -> str:
        """Return one sentence on why the backend ended, once torchrun has written it."""
        self._private.keep()
        try:
            self._agent.wait(EXIT_REPORT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"The backend's connection was lost while its processes still run; its log is {self.log}."
        cause = first_failure(self.folder) or f"its launcher exited with code {self._agent.returncode}"
        return f"The backend ended because {cause}; its log is {self.log}."

    def close(self):
        """End every rank: ask, then close their pipe, then signal what is left. More than once is fine."""
        self._closing = True
        atexit.unregister(self.close)
        if self._client is not None and not self._client.closed:
            try:
                self._client.send(Shutdown())
                self._wait(3)
            except BackendError:
                pass  # it hung up first, which is what was asked for
            self._client.hang_up()  # not closed here: another thread may wait on it
        self._pipe.close()
        if not self._wait(3):
            self._agent.terminate()
            if not self._wait(8):
                self._agent.kill()
        self._agent.wait()
        self._private.close()

    def _wait(self, seconds: float) -> bool:
        try:
            self._agent.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def _free_address(folder: Path) -> str:
    if hasattr(socket, "AF_UNIX") and sys.platform != "win32":
        return f"unix:{folder / 'backend.sock'}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp:127.0.0.1:{probe.getsockname()[1]}"
