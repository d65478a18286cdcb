"""The socket at which rank 0 listens for clients."""

import os
import socket
import stat


def listen(address: str) -> socket.socket:
    """Listen at "unix:PATH" or "tcp:HOST:PORT", where an empty HOST is 127.0.0.1."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        folder = os.path.dirname(where)
        if stat.S_IMODE(os.stat(folder).st_mode) & 0o077:
            raise PermissionError(
                f"the socket's folder {folder} can be entered by other users; make it private (chmod 700)."
            )
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(where)
    else:
        host, _, port = where.rpartition(":")
        # an empty host would be every interface of this machine; who wants that writes 0.0.0.0
        listener = socket.create_server((host or "127.0.0.1", int(port)))
    listener.listen()
    return listener
