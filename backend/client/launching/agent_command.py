"""Command lines of torchrun's agents: where agents and ranks meet, and what a rank runs."""

from collections.abc import Iterable
from pathlib import Path

from ...config import ParallelConfig
from ..machines.machines import Machines
from .interpreter import ranks_python

#: Where the ranks meet, in their private folder; each leaves STORE.ready-RANK there (backend/rank/start.py).
STORE = "ranks-store"
ONE_MACHINE = Machines()


def rendezvous_flags(folder: Path) -> list[str]:
    """Return torchrun's flags for an agent that keeps its state in a file of the private ``folder``. Its
    usual store is a TCP server on all interfaces that authenticates nobody, and the agent unpickles what lies
    in it: whoever reaches the port could run code. The heartbeat is rare, since the file only grows."""
    settings = "store_type=file,keep_alive_interval=3600"
    where = ["--rdzv-endpoint", str(folder / "rdzv"), "--rdzv-conf", settings]
    return ["--rdzv-backend", "c10d", *where, "--local-addr", "127.0.0.1"]


def _static_rendezvous(machines: Machines) -> list[str]:
    """Return torchrun's flags for the agents of several machines: static, which unpickles nothing."""
    which = ["--nnodes", str(machines.count), "--node-rank", str(machines.index)]
    where = ["--rdzv-endpoint", machines.endpoint, "--local-addr", machines.address]
    return ["--rdzv-backend", "static", *which, *where]


def launch_command(
    config: ParallelConfig,
    address: str,
    folder: Path,
    models: Iterable[str] = (),
    heartbeats: str = "",
    machines: Machines = ONE_MACHINE,
) -> list[str]:
    """Return the command line of the agent; the ranks' output goes to files under ``folder`` and through the
    agent's own. Everybody on this machine can read it: token and configuration go through the pipe. Files are
    loaded from below ``models`` alone; the ranks beat in the memory at ``heartbeats``."""
    agent = agent_command(machines.ranks_here(config), folder, machines)
    rank = ["-m", "backend.worker", "--address", address, "--store", str(folder / STORE)]
    return [*agent, *rank, "--parent-pipe", "--heartbeats", heartbeats, "--models", *models]


def agent_command(ranks: int, folder: Path, machines: Machines = ONE_MACHINE) -> list[str]:
    """Return the command line of an agent of so many ranks, without what they run."""
    rendezvous = _static_rendezvous(machines) if machines.count > 1 else rendezvous_flags(folder)
    life = ["--nproc-per-node", str(ranks), "--max-restarts", "0", "--monitor-interval", "0.1"]
    logs = ["--log-dir", str(folder / "ranks"), "--tee", "3"]
    return [ranks_python(), "-m", "torch.distributed.run", *rendezvous, *life, *logs]
