"""The machines of one backend: which this is, where they meet, and which methods cross their network."""

import math
import socket
from dataclasses import dataclass

import psutil

from ...config import AXES, ConfigError, ParallelConfig

#: Axes whose ranks wait for each other in every block: slow over a network.
EVERY_BLOCK = ("ulysses", "tp")


@dataclass(frozen=True)
class Machines:
    """Machine ``index`` of ``count``. They meet at ``endpoint``, HOST:PORT of machine 0, where torchrun's
    store listens; their launchers meet at the port after it. ``interface``: this machine's network interface
    to the others, the only one on which ranks and launchers listen."""

    count: int = 1
    index: int = 0
    endpoint: str = ""
    interface: str = ""

    @property
    def host(self) -> str:
        return self.endpoint.rpartition(":")[0]

    @property
    def link_port(self) -> int:
        """Where the launcher of machine 0 listens for those of the others."""
        return int(self.endpoint.rpartition(":")[2]) + 1

    @property
    def address(self) -> str:
        """This machine's IPv4 address on the interface. Raises ConfigError."""
        interfaces = psutil.net_if_addrs()
        for each in interfaces.get(self.interface, []):
            if each.family == socket.AF_INET:
                return each.address
        raise ConfigError(
            f"--interface is {self.interface!r}, which has no IPv4 address here; this machine has "
            f"{', '.join(interfaces)}."
        )

    def validate(self) -> "Machines":
        """Return self, or raise ConfigError for what is missing."""
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ConfigError(
                f"--nnodes is {self.count} and --node-rank {self.index}; number the machines from 0 to "
                f"{max(0, self.count - 1)}, each once."
            )
        if self.count == 1:
            return self
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65535:
            raise ConfigError(
                f"--nnodes {self.count} needs --rdzv-endpoint HOST:PORT, machine 0's address for the others "
                f"and the first of two free ports there; it is {self.endpoint!r}."
            )
        if not self.interface:
            raise ConfigError(
                f"--nnodes {self.count} needs --interface, the network between the machines (eth1, ib0): "
                f"ranks authenticate nobody, and would listen on whichever network they find."
            )
        _ = self.address  # refuses an interface that is not there
        return self

    def ranks_here(self, config: ParallelConfig) -> int:
        """Return how many ranks of ``config`` each machine runs. Raises ConfigError."""
        if config.world_size % self.count:
            raise ConfigError(
                f"{config.product}, which {self.count} machines cannot share evenly; change a degree or "
                f"--nnodes."
            )
        if self.count > 1 and config.gpus:
            raise ConfigError(
                f"gpus is {config.gpus!r}, but each machine numbers its own; clear it and set "
                f"CUDA_VISIBLE_DEVICES on each."
            )
        return config.world_size // self.count

    @property
    def name(self) -> str:
        """This machine's name for messages, without its address if that is lost; empty where there is one."""
        if self.count == 1:
            return ""
        try:
            return f"machine {self.index} ({self.address})"
        except ConfigError:
            return f"machine {self.index}"


def crossing(degrees: dict[str, int], machines: int) -> dict[str, bool]:
    """Return for each mesh axis of several ranks whether some group of it has ranks of several machines.
    Ranks are numbered machine by machine and the fastest axes are tp, ulysses, ring, pp, cfg, dp. So those
    that speak most often are the last to cross. ``degrees``: sizes, slowest first."""
    here = math.prod(degrees.values()) // machines
    crosses = {}
    span = 1
    for axis, size in reversed(degrees.items()):
        span *= size
        if size > 1:
            crosses[axis] = machines > 1 and here % span != 0
    return crosses


def placement(degrees: dict[str, int], machines: int, shard_weights: bool = False) -> str:
    """Return some sentences on which methods stay inside a machine and which cross the network."""
    crosses = crossing(degrees, machines)
    inside = [f"{AXES[axis]} {degrees[axis]}" for axis in crosses if not crosses[axis]]
    across = [f"{AXES[axis]} {degrees[axis]}" for axis in crosses if crosses[axis]]
    parts = [f"inside a machine {', '.join(inside)}"] if inside else []
    parts += [f"across machines {', '.join(across)}"] if across else []
    here = math.prod(degrees.values()) // machines
    text = f"{machines} machines of {here} rank{'s' * (here > 1)} each: {'; '.join(parts)}."
    slow = [AXES[axis] for axis in EVERY_BLOCK if crosses.get(axis)]
    if slow:
        text += f" Every block waits for the network, by {' and '.join(slow)}; raise another degree instead."
    if shard_weights and any(crosses.get(axis) for axis in ("dp", "ring", "ulysses")):
        text += " Every block's weights come over the network, by shard_weights."
    return text
