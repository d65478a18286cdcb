"""Starts one backend on this machine and ends it: a torchrun agent, its ranks, and the private folder of
their socket and logs. Imports neither ComfyUI nor torch.distributed."""

import atexit
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from ..config import ParallelConfig
from ..protocol import BackendError, Shutdown
from ..protocol.heartbeats import Heartbeats
from .cache_folder import cache_folder
from .client import BackendClient
from .exit_report import first_failure, full_disk
from .private_folder import LOGS, PrivateFolder
from .silence import CANCEL_SECONDS, SilenceWatch, is_of

PACK = Path(__file__).resolve().parents[2]
#: Starting takes seconds on a warm disk and minutes on a cold network one.
READY_SECONDS = 300.0
#: Where the ranks meet, in their private folder; each leaves STORE.ready-RANK there (backend/start.py).
STORE = "ranks-store"
#: After a rank has ended, torchrun needs this long at most to end the others and to write why.
EXIT_REPORT_SECONDS = 8.0
#: Settings of torch's allocator, under the names of several versions of it.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
#: Segments that grow: requests of other sizes leave no gaps that nothing fits into.
_GROWING = "expandable_segments:True"
#: What another launcher, or ComfyUI for its own process, may have set and a fresh group must not inherit.
_DROPPED = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *_ALLOCATOR,
    *("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
    # before torch 2.8 it gives memory back that a send still reads; later it is the default, and harmless
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    # 1, as Megatron-LM sets it, puts communication behind compute on one hardware queue
    "CUDA_DEVICE_MAX_CONNECTIONS",
    # another function than the one that the attention hook replaces (sampling/model_runner.py)
    *("DIFFUSERS_ATTN_BACKEND", "DIFFUSERS_ATTN_CHECKS"),
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


def allocator_settings(parent: dict) -> dict:
    """Return the allocator's settings for ranks on GPUs: the user's, else segments that grow, where torch has
    them. ComfyUI adds ``backend:cudaMallocAsync`` to the user's for its own process, which is left out."""
    found = {}
    for name in _ALLOCATOR:
        parts = [part.strip() for part in parent.get(name, "").split(",")]
        users = [part for part in parts if part and not part.startswith("backend:")]
        if users:
            found[name] = ",".join(users)
    if found or sys.platform != "linux":
        return found
    return dict.fromkeys(_ALLOCATOR[:2], _GROWING)  # torch before 2.9 knows the second alone


def sanitized_environment(parent: dict, config: ParallelConfig, device: str) -> dict:
    """Return the environment of agent and ranks: ``parent`` with our settings, no other launcher's."""
    env = {
        name: value
        for name, value in parent.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.world_size)))
    # compiled blocks: one folder for all ranks, private since code is loaded from it
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores // config.world_size)))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACK), parent.get("PYTHONPATH")]))
    env["PYTHONUNBUFFERED"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""
    if device == "cuda":
        indices = config.gpu_indices
        visible = parent.get("CUDA_VISIBLE_DEVICES")  # this process may itself see a selection only
        names = visible.split(",") if visible else [str(i) for i in range(max(indices) + 1)]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[index].strip() for index in indices)
        env |= allocator_settings(parent)
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
    config: ParallelConfig, address: str, folder: Path, models: Iterable[str] = (), heartbeats: str = ""
) -> list[str]:
    """Return the command line of the agent; the ranks' output goes to files under ``folder`` and through the
    agent's own. Everybody on this machine can read it: token and configuration go through the pipe. Files are
    loaded from below ``models`` alone; the ranks beat in the memory at ``heartbeats``."""
    agent = agent_command(config.world_size, folder)
    rank = ["-m", "backend.worker", "--address", address, "--store", str(folder / STORE)]
    return [*agent, *rank, "--parent-pipe", "--heartbeats", heartbeats, "--models", *models]


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

    def __init__(
        self,
        config: ParallelConfig,
        device: str,
        models: Iterable[str] = (),
        address: str = "",
        token: str = "",
    ):
        """Start ranks on ``device``, "cuda" or "cpu", that may load files below the folders ``models``.
        ``address`` and ``token`` are those of other clients; without them there are none."""
        self.models = frozenset(models)
        self._ranks = config.world_size
        self._private = _private_folder()
        self.folder = self._private.path
        self.log = self.folder / "backend.log"
        LOGS.append(self.log)
        #: Which rank was found to hang, and ended with all others; empty while none was.
        self.silence = ""
        self._heartbeats = Heartbeats.make(config.world_size, self.folder)
        self.address = address or _free_address(self.folder)
        self._token = token or secrets.token_hex(32)
        self._client = None
        self._closing = False
        # the ranks see their own devices only, numbered from 0
        seen = replace(config, device=device, gpus="", address="")
        allowed = sorted(self.models)
        with open(self.log, "wb") as log:
            self._agent = subprocess.Popen(
                launch_command(config, self.address, self.folder, allowed, self._heartbeats.path),
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
        self._watch = SilenceWatch(self._heartbeats, self._end_silent)
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
        self._watch.ready()
        return client

    def _try_to_connect(self, check) -> BackendClient | None:
        try:
            return self.connect_again(check)
        except OSError:  # nobody listens yet, or nobody will
            if self.running:
                return None
            raise self.failure() from None
        except BackendError as error:
            raise self.failure() from error

    @property
    def ready(self) -> str:
        """How many ranks have imported everything and wait for the others, for a message; empty for none."""
        found = sum(1 for _ in self.folder.glob(f"{STORE}.ready-*"))
        return f": {found} of {self._ranks} ready" if found else ""

    @property
    def running(self) -> bool:
        return not self.silence and self._agent.poll() is None

    @property
    def ended_as_asked(self) -> bool:
        """Has a client told it to end?"""
        return not self.silence and self._agent.poll() == 0

    def failure(self) -> BackendError:
        """Return the error for a request that the backend has not answered: its failure cause, or ClosedError
        where we are ending it."""
        if self._closing:
            return ClosedError("The backend ends with the process that started it.")
        return BackendError(self.failure_cause())

    def failure_cause(self) -> str:
        """Return one or two sentences on why the backend ended, once torchrun has written it, or what the
        ranks have left while their processes still run."""
        self._private.keep()
        if not self.silence:
            self._wait(EXIT_REPORT_SECONDS)
        cause = self.silence or first_failure(self.folder)
        status = self._agent.poll()
        disk = full_disk(self.folder)
        if cause is None and status is None:
            what = "The backend's connection was lost while its processes still run"
            return f"{what}; its log is {self.log}.{disk}"
        cause = cause or f"its launcher exited with code {status}"
        return f"The backend ended because {cause}; its log is {self.log}.{disk}"

    def connect_again(self, check=lambda: None) -> BackendClient:
        """Return one more client of rank 0. Errors as of BackendClient."""
        return BackendClient(self.address, self._token, check, self._is_hung)

    def close(self):
        """End every rank: ask, then close their pipe, then kill what is left. More than once is fine."""
        self._closing = True
        atexit.unregister(self.close)
        self._watch.stop()
        if self._client is not None and not self._client.closed:
            try:
                self._client.send(Shutdown())
                self._wait(3)
            except BackendError:
                pass  # it hung up first, which is what was asked for
            self._client.hang_up()  # not closed here: another thread may wait on it
        self._pipe.close()
        if self._is_hung() or not self._wait(3):
            self._kill_ranks()  # those that live do not see the end of their pipe
        # where a rank was silent all are dead by now, and torchrun may be stopped, too
        if not self._wait(1 if self.silence else 3):
            self._agent.terminate()
            if not self._wait(1 if self.silence else 8):
                self._agent.kill()
        self._agent.wait()
        self._heartbeats.close()
        self._private.close()

    def _is_hung(self) -> bool:
        """Has a rank been silent for so long that nobody waits for it who wants to stop?"""
        self.silence = self.silence or self._watch.silent(CANCEL_SECONDS)
        return bool(self.silence)

    def _end_silent(self, silence: str):
        """End all ranks, one of which hangs: the others may wait for it for hours."""
        if not self._closing:
            self.silence = silence
            self._kill_ranks()

    def _kill_ranks(self):
        """Kill the ranks that live: processes whose command line has our folder, whose name is random."""
        for beat in self._heartbeats.read():
            if is_of(beat.pid, self.folder):
                try:
                    os.kill(beat.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def _wait(self, seconds: float) -> bool:
        try:
            self._agent.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def _private_folder() -> PrivateFolder:
    """Return a new folder, or BackendError where the disk has no room for one."""
    try:
        return PrivateFolder()
    except OSError as error:
        place = tempfile.gettempdir()
        what = f"No folder for the backend's socket and logs can be made in {place} ({error})"
        raise BackendError(f"{what}; make room there, or set TMPDIR to another folder.") from error


def _free_address(folder: Path) -> str:
    if hasattr(socket, "AF_UNIX") and sys.platform != "win32":
        return f"unix:{folder / 'backend.sock'}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp:127.0.0.1:{probe.getsockname()[1]}"
