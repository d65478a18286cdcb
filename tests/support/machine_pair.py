"""Two machines of a backend on loopback, whose launchers meet (client/machines/machine_rendezvous.py)."""

import socket
from dataclasses import replace

from backend.client.machines.machines import Machines

TOKEN = "4" * 64
HELLO = {"pack": "1", "diffusers": "3"}
BEGIN = {"config": {"cfg_degree": 2}, "device": "cpu"}
PATIENCE = 60


class GaveUp(Exception):
    pass


def two_free_ports() -> int:
    """Return a free port whose next one is free too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
                return port
            except OSError:
                pass


def two_machines() -> tuple[Machines, Machines]:
    """Return both, at two free ports."""
    head = Machines(2, 0, f"127.0.0.1:{two_free_ports()}", "lo").validate()
    return head, replace(head, index=1)
