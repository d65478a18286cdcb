"""How the backends of this process are, also while they work: asked through a connection of its own."""

import os
import stat
import threading
import time
from pathlib import Path
from weakref import WeakKeyDictionary

from ..protocol import BackendError, Report, Status
from .client import BackendClient
from .connect import token_of_environment
from .launching.private_folder import LOGS, open_within
from .pool import Backend
from .silence import STATES, process_state

#: Rank 0 answers while the ranks work; one that needs longer is busy with Python, or hangs.
ANSWER_SECONDS = 3.0
#: Bytes at the end of a log that are shown.
LOG_BYTES = 1 << 16

_lock = threading.Lock()
_clients: "WeakKeyDictionary[Backend, BackendClient]" = WeakKeyDictionary()


def report(backend: Backend) -> Report:
    """Ask rank 0 how the backend is. Raises BackendError where it does not answer soon."""
    deadline = time.monotonic() + ANSWER_SECONDS

    def check():
        if time.monotonic() > deadline:
            raise BackendError(f"rank 0 has not answered for {ANSWER_SECONDS:.0f} s")

    with _lock:
        client = _clients.get(backend)
        if client is None or client.closed:
            client = _clients[backend] = _connected(backend, check)
        return client.request(Status(), check)


def _connected(backend: Backend, check) -> BackendClient:
    try:
        if backend.process is not None:
            return backend.process.connect_again(check)
        return BackendClient(backend.config.address, token_of_environment(), check)
    except OSError as error:
        raise BackendError(f"nobody listens at {backend.client.address} ({error})") from error


def rank_state(backend: Backend, pid: int, is_working: bool) -> str:
    """Say in a word or two what a rank does; a stopped process is known of this machine's alone."""
    if backend.process is not None:
        state = process_state(pid)
        if state in STATES or state in ("", "Z", "X"):
            return STATES.get(state, "its process has ended")
    return "computes" if is_working else "ready"


def log_of_last_backend() -> str:
    """Return the end of the newest log that there still is of a backend that this process has started."""
    return next(filter(None, map(end_of, reversed(list(LOGS)))), "")


def end_of(path: Path) -> str:
    """Return the end of the log in a private folder; empty where it has gone, or is no file of one."""
    try:
        with os.fdopen(open_within(path.parent, path.name, os.O_RDONLY), "rb") as log:
            status = os.fstat(log.fileno())
            if not stat.S_ISREG(status.st_mode):
                return ""
            log.seek(max(0, status.st_size - LOG_BYTES))
            return log.read(LOG_BYTES).decode(errors="replace")
    except OSError:  # its backend has ended as it was asked to
        return ""
