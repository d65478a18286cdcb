"""Opens a connection to whatever listens at an address."""

import socket

from ..config import ConfigError
from ..protocol import socket_options

#: A listener takes a connection within this long.
CONNECT_SECONDS = 10.0


def open_socket(address: str) -> socket.socket:
    """Connect to "unix:PATH" or "tcp:HOST:PORT", where an empty HOST is this machine, as it is for a backend
    that listens. Raises OSError where nobody listens, ConfigError for another form."""
    scheme, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    if scheme == "unix" and place and hasattr(socket, "AF_UNIX"):
        family = socket.AF_UNIX
        target = place
    elif scheme == "tcp" and port.isdecimal() and int(port) < 65536:
        family = socket.AF_INET
        target = (host or "127.0.0.1", int(port))
    else:
        raise ConfigError(
            f"address is {address!r}, which is not a backend's address here; write unix:/path/to/socket or "
            f"tcp:HOST:PORT, or leave it empty to launch a backend."
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_SECONDS)
    try:
        sock.connect(target)
        socket_options.prepare(sock)
    except (UnicodeError, TypeError) as error:  # of a name that no host can have
        sock.close()
        raise OSError(f"{host!r} is no host's name") from error
    except OSError:
        sock.close()
        raise
    return sock
