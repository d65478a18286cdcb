"""The life of a connected backend: who uses it, whether it lives, why it ended, and its end."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ..config import ParallelConfig
from ..protocol import BackendError, Cancel
from ..units import progress_text
from .auto.model_choice import ModelChoice
from .client import BackendClient, Left
from .interrupts import POLL_SECONDS
from .launching.launcher import BackendProcess

#: A wait that is shorter is not worth a line: each step of a client that keeps the loop is a request.
SHOWN_SECONDS = 0.5
#: A first step that takes as long as any is not worth a line.
SLOW_SECONDS = 3.0
#: What a node says of a step that goes on after Cancel, then of the next run, and how ranks of ours end.
LEFT = "cancelled; the next run waits for the end of the step under way"
STOP = "Stop ranks in the side panel ends it now"
WAITS = "waiting for the step of a cancelled request to end"
STOP_BOTH = "Stop ranks in the side panel ends it, and this run"


class Connected:
    """A connection to a backend, and its process where we launched it."""

    def __init__(self, config: ParallelConfig, client: BackendClient, process: BackendProcess | None = None):
        self.config = config
        self.client = client
        self.process = process
        #: Model -> the backend's name of it, without LoRAs (Loaded.base); the least recently used one first.
        self.models: dict[ModelChoice, str] = {}
        #: Models of files that have changed since, until they are unloaded.
        self.replaced: set[str] = set()
        #: Those that were parked on all ranks to make room, and that nobody has used since.
        self.aside: set[ModelChoice] = set()
        self.closed = False
        #: Why it ended, as the first request that failed of it has found.
        self.why: BackendError | None = None
        self.last_used = time.monotonic()
        self._busy = threading.Lock()
        self._samplings = 0
        #: Waits for the end of a request that Cancel has left.
        self._finishing: threading.Thread | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count as busy between the requests of a sampling, too. ComfyUI runs graphs on one thread."""
        self._samplings += 1
        try:
            yield
        finally:
            self._samplings -= 1

    @property
    def welcome(self):
        return self.client.welcome

    @property
    def wait_line(self) -> str:
        """Say for which other client's request ours has waited a while, or for which one that Cancel has
        left; empty where it does not."""
        left = self.client.left
        if left is not None:
            return self._about(left, f"{WAITS}, {time.monotonic() - left.since:.0f} s", STOP_BOTH)
        waiting = self.client.waiting
        if waiting is None or time.monotonic() - self.client.waits_since < SHOWN_SECONDS:
            return ""
        others = f", {waiting.before} more before it" if waiting.before else ""
        if waiting.running == Cancel.__name__:
            return f"{WAITS}{others}"
        steps = waiting.total - waiting.step
        goes_on = ""
        if waiting.total and waiting.running == "Sample":
            goes_on = f", {steps} step{'s' * (steps != 1)} left"
        elif waiting.total:
            goes_on = f", which reads {progress_text(waiting.step, waiting.total)}"
        return f"waiting for another client's request{goes_on}{others}"

    @property
    def left_line(self) -> str:
        """Say that a step goes on after Cancel, what it does, and how it is ended; empty where none does."""
        left = self.client.left
        return self._about(left, LEFT, STOP) if left is not None else ""

    def _about(self, left: Left, what: str, stop: str) -> str:
        return "; ".join(filter(None, [what, left.reason, stop if self.process is not None else ""]))

    @property
    def step_line(self) -> str:
        """Say what the step under way of our request does besides computing, once it has taken a while; empty
        where it is as others."""
        timer = self.client.timer
        return timer.reason if timer is not None and timer.spent >= SLOW_SECONDS else ""

    def alive(self) -> bool:
        """Return whether the process runs and the connection is open; costs no round trip."""
        if self.client.closed or (self.process is not None and not self.process.running):
            return False
        if not self._busy.acquire(blocking=False):
            return True  # a request is under way, and finds out by itself
        try:
            return self.client.is_open()
        finally:
            self._busy.release()

    def leave(self, turn: ExitStack):
        """Have a thread wait for the end of what Cancel has left, and hold the ``turn`` of its request until
        then: nothing else is sent. Ranks that never end it are ended as if its caller had waited."""
        name = "cancelled request"
        thread = threading.Thread(target=self._finish, args=(turn,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this process may have no more threads
            self._finish(turn)
        else:
            self._finishing = thread

    def _finish(self, turn: ExitStack):
        with turn:
            try:
                self.client.finish()
            except BackendError:  # the next run says why (loss)
                if not self.closed:  # by somebody who ends the ranks
                    logging.warning("parallel-dit: the backend ended in the step of a cancelled request.")
                return
            finally:
                self.last_used = time.monotonic()
            if self.client.closed:
                self.close()
            self.report_end()

    def report_end(self):
        """Log why a cancelled request has ended its backend, where it has."""
        if self.closed:
            silence = self.process.silence if self.process is not None else ""
            why = silence or "the call of the model in progress did not end in time"
            logging.warning("parallel-dit: cancelled; the next run starts afresh, since %s.", why)

    @property
    def is_left(self) -> bool:
        """Return whether a request goes on that Cancel has left."""
        return self._finishing is not None and self._finishing.is_alive()

    def settled(self, check: Callable[[], None], show: Callable[[str], None]) -> bool:
        """Wait until what Cancel has left has ended; return whether the backend lives. ``check`` may raise
        meanwhile, ``show`` gets a line."""
        while self._finishing is not None and self._finishing.is_alive():
            show(self.wait_line)
            check()
            self._finishing.join(POLL_SECONDS)
        return self.alive()

    @property
    def is_busy(self) -> bool:
        """Return whether a request or a sampling of ours is under way."""
        return self._busy.locked() or self._samplings > 0

    def is_idle(self, seconds: float) -> bool:
        """Return whether it is ours, and nobody has used it for so long. Nobody waits for what Cancel has
        left."""
        is_unused = not self.is_busy or (self.is_left and not self._samplings)
        return self.process is not None and is_unused and time.monotonic() - self.last_used >= seconds

    def loss(self) -> str:
        """Say why a backend ended between two requests, or after Cancel; empty where a request said it, or we
        closed it. It is said while the next run starts."""
        if self.closed:
            return ""
        if self.process is not None:
            return self.process.failure_cause(starts_anew=True)
        why = f": {self.client.last_word}" if self.client.last_word else "."
        return f"The backend at {self.config.address} has hung up since the last run{why}"

    def close(self):
        """Hang up, and end the processes where they are ours."""
        self.closed = True
        if self.process is not None:
            self.process.close()
        self.client.close()

    def _request(self, message, *watching):
        return self._explained(self.client.request, message, *watching)

    def _explained(self, action, *arguments):
        """Run ``action``; raise what ended the backend where it fails. Later requests of the same graph raise
        the first cause again: by then we have closed the backend, which alone is no failure."""
        try:
            return action(*arguments)
        except BackendError as error:
            if self.why is None and self.process is not None:
                self.why = self.process.failure()
            elif self.why is None:
                self.why = BackendError(f"{error}; the next run connects again.")
            # a new one each time: a traceback would hold the tensors of its request as long as the backend
            raise type(self.why)(*self.why.args) from error
        finally:
            self.last_used = time.monotonic()
            if self.client.closed:
                self.close()
