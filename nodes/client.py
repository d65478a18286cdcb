"""The client's end of a backend's socket: one request at a time, with progress and cancel while a sample
runs.

Imports neither ComfyUI nor torch.distributed: scripts use it as the nodes do.
"""

import selectors
import socket
import time

from ..backend import frames, protocol
from ..backend.config import ConfigError
from ..backend.protocol import BackendError, Failure, RefusedError

#: How often a wait looks whether somebody wants to stop.
POLL_SECONDS = 0.1
#: The ranks get this long a start before what is done meanwhile: on a machine whose cores are busy it would
#: keep them from reading the request.
START_SECONDS = 0.01
#: A peer that stops in the middle of a frame for this long is gone.
FRAME_SECONDS = 60.0
#: Longest wait for the end of the step that runs when Cancel is sent.
CANCEL_SECONDS = 120.0


def open_socket(address: str, seconds: float = 10.0) -> socket.socket:
    """A connected socket for "unix:PATH" or "tcp:HOST:PORT"; OSError where nobody listens, ConfigError for
    another form."""
    scheme, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    if scheme == "unix" and place and hasattr(socket, "AF_UNIX"):
        family, target = socket.AF_UNIX, place
    elif scheme == "tcp" and host and port.isdigit():
        family, target = socket.AF_INET, (host, int(port))
    else:
        raise ConfigError(
            f"address is {address!r}, which is not a backend's address here; write unix:/path/to/socket or "
            f"tcp:HOST:PORT, or leave it empty to launch a backend."
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(seconds)
    try:
        sock.connect(target)
    except OSError:
        sock.close()
        raise
    if scheme == "tcp":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class BackendClient:
    """A connection that has shown its token; ``welcome`` says what runs behind it, ``check`` is as in
    ``request``.

    Not thread-safe: one caller at a time. Raises OSError where nobody listens at ``address``, BackendError
    where the peer hangs up or does not let us in.
    """

    def __init__(self, address: str, token: str, check=lambda: None):
        self.address = address
        self.closed = False
        self._socket = open_socket(address)
        self._socket.settimeout(FRAME_SECONDS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self.welcome = self._greet(token, check)

    def request(self, message, check=lambda: None, on_progress=lambda progress: None):
        """The reply to a message that has one; Progress on the way to it goes to ``on_progress``, on this
        thread.

        ``check()`` is called about ten times a second during the wait. What it raises closes the connection,
        because the reply that is still to come could be taken for the next one's; so does what
        ``on_progress`` raises. RefusedError: refused, the backend stays as it was.
        BackendError: it ended.
        """
        self._send(message)
        try:
            while (reply := self._next()) is None or isinstance(reply, protocol.Progress):
                if reply is not None:
                    on_progress(reply)
                check()
        except BaseException:
            self.close()
            raise
        return self._accepted(reply)

    def sample(
        self,
        message: protocol.Sample | protocol.ModelCall,
        on_progress=lambda progress: None,
        should_cancel=lambda: False,
        meanwhile=lambda: None,
    ):
        """Run one Sample or ModelCall to its Result, or None where ``should_cancel`` stopped it.
        ``meanwhile()`` runs once it is sent, while the ranks work.

        ``on_progress(Progress)`` runs on this thread. What it raises cancels the request, waits for its end
        and is raised again, so that the connection stays usable.
        """
        self._send(message)
        try:
            self._selector.select(START_SECONDS)
            meanwhile()
            while not should_cancel():
                reply = self._next()
                if isinstance(reply, protocol.Progress):
                    on_progress(reply)
                elif reply is not None:
                    return self._accepted(reply)
        except (BackendError, RefusedError):
            raise
        except BaseException:
            self._cancel()
            raise
        self._cancel()
        return None

    def send(self, message):
        """Send a message that has no reply."""
        self._send(message)

    def close(self):
        """Hang up; more than once is fine."""
        if not self.closed:
            self.closed = True
            self._selector.close()
            self._socket.close()

    def _greet(self, token: str, check) -> protocol.Welcome:
        try:
            reply = self.request(protocol.Hello(token), check)
        except (BackendError, RefusedError) as error:
            self.close()
            raise BackendError(
                f"The backend at {self.address} did not let this client in ({error}); check that "
                f"PARALLEL_DIT_TOKEN is the token that it was started with."
            ) from error
        if not isinstance(reply, protocol.Welcome):
            self.close()
            raise BackendError(
                f"The backend at {self.address} answered {type(reply).__name__} where Welcome belongs; it "
                f"is another program or another version."
            )
        return reply

    def _cancel(self):
        self._send(protocol.Cancel())
        deadline = time.monotonic() + CANCEL_SECONDS
        while time.monotonic() < deadline:
            reply = self._next()
            if isinstance(reply, Failure) and reply.fatal:
                self._accepted(reply)
            if reply is not None and not isinstance(reply, protocol.Progress):
                return
        self.close()
        raise BackendError(f"The backend did not stop within {CANCEL_SECONDS:.0f} s of Cancel")

    def _next(self):
        """The next message, or None where none begins within POLL_SECONDS; a frame that began is read to its
        end."""
        if self.closed:
            raise BackendError(f"The connection to the backend at {self.address} is closed")
        try:
            return frames.receive(self._socket) if self._selector.select(POLL_SECONDS) else None
        except OSError as error:
            self.close()
            raise BackendError(
                f"The connection to the backend at {self.address} was lost ({error})"
            ) from error

    def _send(self, message):
        if self.closed:
            raise BackendError(f"The connection to the backend at {self.address} is closed")
        try:
            frames.send(self._socket, message)
        except protocol.ProtocolError as error:  # it has no frame, so nothing was sent
            raise RefusedError(f"The request cannot be sent: {error}") from error
        except OSError as error:
            self.close()
            raise BackendError(
                f"The connection to the backend at {self.address} was lost ({error})"
            ) from error

    def _accepted(self, reply):
        if not isinstance(reply, Failure):
            return reply
        if not reply.fatal:
            raise RefusedError(reply.message)
        self.close()
        raise BackendError(reply.message)
