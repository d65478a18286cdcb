"""Interrupts of requests that nobody can cancel, and of waits for others'."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from ..protocol import WITHDRAWABLE, RefusedError
from ..runtime.callbacks import nothing

#: Seconds that an interrupt waits for the reply: ranks that hang, or work for another client, send none.
PATIENCE = 20.0
#: How often a wait for a lock looks whether somebody wants to stop, in seconds.
POLL_SECONDS = 0.1


@contextmanager
def turn(lock: Lock, check: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that others may hold for minutes; ``check`` may raise meanwhile: nothing has been sent."""
    while not lock.acquire(timeout=POLL_SECONDS):
        check()
    try:
        yield
    finally:
        lock.release()


def deadline(seconds: float, what: str) -> Callable[[], None]:
    """Return a check that raises DeadlineError, which says ``what``, early enough to end a short request
    (InterruptWatch) within ``seconds`` from now."""
    end = time.monotonic() + seconds - PATIENCE

    def check():
        if time.monotonic() > end:
            raise DeadlineError(f"{what} for {seconds:.0f} s.")

    return check


class DeadlineError(Exception):
    """What nobody could cancel has taken too long."""


class CancelledError(Exception):
    """Somebody has cancelled what waits for its turn."""


def cancel(is_wanted: Callable[[], bool]):
    """Raise CancelledError where a cancel ``is_wanted``: a check for ``turn``."""
    if is_wanted():
        raise CancelledError


class InterruptWatch:
    """Delays interrupts: ``check`` and ``on_progress`` for BackendClient.request.

    An exception out of them closes the connection, which ends the ranks and frees all weights. A short
    request is not worth that, such as one that only names LoRAs. So its interrupt waits for the reply, at
    most for PATIENCE seconds. Progress shows that a request is not short, and ends the wait. One that waits
    for another client's has not begun, and is interrupted at once if it is WITHDRAWABLE. Where it has ended
    by then (``late_reply`` of the client), its interrupt waits until the caller has noted that.
    """

    def __init__(
        self, client: Any, check: Callable[[], None], on_progress: Callable = nothing, is_short: bool = True
    ):
        self._client = client
        self._check = check
        self._may_withdraw = False
        self._on_progress = on_progress
        self._is_short = is_short
        self._interrupt: BaseException | None = None
        self._since = 0.0

    def ask(self, request: Callable, message):
        """Return ``request``'s reply to ``message``; a refusal is re-raised as the interrupt that waits."""
        self._may_withdraw = isinstance(message, WITHDRAWABLE)
        try:
            return request(message, self.check, self.on_progress)
        except RefusedError:
            self.end()
            raise
        except BaseException as interrupt:
            if self._client.late_reply is None:
                raise
            self._hold(interrupt)
            return self._client.late_reply

    def check(self):
        """Let the caller interrupt the request, at once or at its end."""
        if self._may_withdraw and self._client.waiting is not None:
            self.end()
            self._check()
        elif not self._is_short:
            self._check()
        elif self._interrupt is None:
            try:
                self._check()
            except BaseException as interrupt:  # by whatever the caller interrupts
                self._hold(interrupt)
        elif time.monotonic() > self._since + PATIENCE:
            self.end()

    def on_progress(self, progress):
        """Tell the caller; weights are being loaded."""
        self._is_short = False
        self.end()
        self._on_progress(progress)

    def _hold(self, interrupt: BaseException):
        """Keep an interrupt, which ``end`` raises."""
        self._interrupt = interrupt
        self._since = time.monotonic()

    def end(self):
        """Raise the interrupt that has waited, if there is one."""
        if self._interrupt is not None:
            raise self._interrupt
