"""Options of both ends of a tcp connection between client and rank 0. Standard library only."""

import socket

#: Frames leave at once. A peer whose machine or link is gone is found after 30 s without a word and three
#: questions 10 s apart, or where it takes nothing of what is on its way for a minute (milliseconds).
OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,
}


def prepare(connection: socket.socket):
    """Set the options that this system has; a unix socket has none of them. Raises OSError."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in OPTIONS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
