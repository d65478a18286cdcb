"""Options of both ends of a connection between client and rank 0. Standard library only."""

import socket

#: Bytes that an end writes to a unix socket before it waits for the other: as many as this system grants
#: (Linux: net.core.wmem_max). With few, both ends take turns, and a latent takes up to twice as long.
UNIX_BUFFER = 2**22
#: Of TCP: frames leave at once. A peer whose machine or link is gone is found after 30 s without a word and
#: three questions 10 s apart, or where it takes nothing of what is on its way for a minute (milliseconds).
TCP_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,
}


def prepare(connection: socket.socket):
    """Set the options that this system has. Raises OSError."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER)
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
