"""The queue of requests of all clients: one runs at a time, and who waits for another client's is told so."""

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from .. import protocol

if TYPE_CHECKING:
    from .server import Connection

#: Requests that Cancel stops.
CANCELLABLE = (protocol.Sample, protocol.ModelCall)
#: Requests that are of use where who sent them has gone.
FREEING = (protocol.Unload, protocol.Release)
#: Least time between two rounds of Waiting while one request goes on.
WAITING_SECONDS = 0.5


@dataclass(eq=False)
class Job:
    """A client's request, waiting or running. ``reply`` may be called from any thread."""

    message: object
    client: "Connection"
    cancelled: threading.Event = field(default_factory=threading.Event)
    #: Whether the ranks have it. A job without a message is done.
    running: bool = False
    #: Whether its client has been sent Waiting.
    waits: bool = False
    #: Whether its client has been sent Cancelled, and may send more: ranks have yet to give its memory back.
    is_answered: bool = False
    #: How far it is, as in Progress.
    step: int = 0
    total: int = 0

    def reply(self, message):
        """Queue a reply to the client. Progress is also of use to clients that wait for this request."""
        if isinstance(message, protocol.Failure):
            self.client.server.last_error = message.message
        if isinstance(message, protocol.Cancelled):
            self.is_answered = True  # before the client can send the next request
        self.client.outbox.put(message)
        if isinstance(message, protocol.Progress):
            self.step = message.step
            self.total = message.total
            self.client.server.jobs.goes_on()

    @property
    def is_abandoned(self) -> bool:
        """Return whether its client has gone, and nobody else is served by it."""
        return self.client.gone and not isinstance(self.message, FREEING)

    @property
    def client_keeps_up(self) -> bool:
        """Return whether no earlier reply waits; previews are left out while one does."""
        return self.client.outbox.empty()


class JobQueue:
    """Jobs in the order in which they came, and the one that runs. Any thread may put one, one thread takes
    them."""

    def __init__(self):
        #: Held while a waiting job is given to the ranks, or cancelled.
        self.taking = threading.Lock()
        self.running: Job | None = None
        #: Kind of request -> how many were answered.
        self.answered: Counter[str] = Counter()
        #: Kind of the request under way, "" for none, and when it began.
        self.under_way = ("", 0.0)
        self._waiting: deque[Job] = deque()
        self._came = threading.Condition(self.taking)
        self._next_round = 0.0

    def put(self, job: Job):
        """Queue a job; tell its client where it waits for another one's."""
        with self._came:
            self._waiting.append(job)
            self._send_waiting(job)
            self._came.notify()

    def next(self, timeout: float) -> Job | None:
        """Return the oldest waiting job, which runs from now on; None after ``timeout`` seconds."""
        with self._came:
            if not self._came.wait_for(self.qsize, timeout):
                return None
            job = self._waiting.popleft()
            job.running = True
            self.running = job
            self.under_way = (type(job.message).__name__, time.monotonic())
            if job.waits:
                job.client.outbox.put(protocol.Begun())
            self._send_waiting_to_all()
            return job

    def finish(self, job: Job):
        """Mark a job as done, which Cancel no longer stops. Of one that waits: who calls holds ``taking``."""
        if job in self._waiting:
            self._waiting.remove(job)
            self._send_waiting_to_all()
        if job.running:
            self.answered[self.under_way[0]] += 1
            self.under_way = ("", 0.0)
            self.running = None
        job.message = None

    def goes_on(self):
        """Tell clients that wait how far the request is that runs, not too often."""
        now = time.monotonic()
        if self._waiting and now >= self._next_round:
            self._next_round = now + WAITING_SECONDS
            with self.taking:
                self._send_waiting_to_all()

    def qsize(self) -> int:
        """Return how many jobs wait, of any client."""
        return len(self._waiting)

    def _send_waiting_to_all(self):
        for job in list(self._waiting):
            if job.client_keeps_up:
                self._send_waiting(job)

    def _send_waiting(self, job: Job):
        """Send Waiting for a job that is the oldest of its client without an answer, and not the next one of
        all."""
        before = takewhile(lambda each: each is not job, self._waiting)
        ahead = [each for each in before if not each.is_abandoned]
        runs = self.running
        unanswered = [each for each in (runs, *ahead) if each is not None and not each.is_answered]
        if any(each.client is job.client for each in unanswered) or (runs is None and not ahead):
            return
        job.waits = True
        about = (self.under_way[0], runs.step, runs.total) if runs is not None else ("", 0, 0)
        if runs is not None and runs.is_answered:
            about = (protocol.Cancel.__name__, 0, 0)
        job.client.outbox.put(protocol.Waiting(*about, before=len(ahead)))
