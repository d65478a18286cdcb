"""Errors of who speaks to a backend."""

from ..errors import SHORT


class ProtocolError(ConnectionError):
    """The peer does not speak this protocol; the connection is closed."""

    __module__ = SHORT


class BackendError(RuntimeError):
    """The backend ended or cannot be reached; the message names the rank and the log where they are known."""

    __module__ = SHORT


class RefusedError(ValueError):
    """The backend refused a request and stays warm; the message says what, why and the remedy. ``lacking``:
    rank -> bytes that should be free on its device, where there was too little."""

    __module__ = SHORT
    lacking: dict[int, int] = {}
