"""Progress of a request, told to its client: steps with previews, and the bytes of a load."""

import time
from collections.abc import Callable

from torch import Tensor

from .. import protocol
from ..loading.staging import Download
from .job_queue import Job

#: Least time between two messages about a load's progress.
LOAD_SECONDS = 0.1


class Previews:
    """Allow one preview in ``seconds``; count them, and the seconds that the ranks waited for them."""

    def __init__(self, seconds: float, clock: Callable[[], float]):
        self.seconds = seconds
        self.clock = clock
        self.last = float("-inf")
        self.count = 0
        self.spent = 0.0
        self.coming: Download | None = None

    def due(self) -> bool:
        """Return whether a preview is wanted now; then the next one is ``seconds`` away."""
        if not self.seconds or self.clock() - self.last < self.seconds:
            return False
        self.last = self.clock()
        return True

    def latest(self, start: Callable[[], Download]) -> dict[str, Tensor]:
        """Return a preview that has arrived, as x0, if there is one. Where none is on its way and one is due,
        ``start`` it: on the CPU it arrives at once, from a GPU after this step or a later one."""
        began = self.clock()
        preview = self._arrived()
        if self.coming is None and self.due():
            self.coming = start()
            preview = preview or self._arrived()
        self.spent += self.clock() - began
        return preview

    def _arrived(self) -> dict[str, Tensor]:
        x0 = self.coming.arrived() if self.coming else None
        if x0 is None:
            return {}
        self.coming = None
        self.count += 1
        return {"x0": x0}

    @property
    def stats(self) -> dict:
        """Return their number and cost for a Result."""
        return {"previews": self.count, "preview_seconds": self.spent}


def progress(job: Job, step: int, total: int, previews: Previews, start: Callable[[], Download]):
    """Reply that ``step`` of ``total`` steps are done, with Previews.latest for a client that keeps up."""
    tensors = previews.latest(start) if job.client_keeps_up else {}
    job.reply(protocol.Progress(step, total, tensors))


def load_progress(job: Job) -> Callable[[int, int], None]:
    """Return a callback that reports to the client how many bytes of the file rank 0 has loaded."""
    rate = Previews(LOAD_SECONDS, time.monotonic)

    def report(done, total):
        if rate.due() or done == total:
            job.reply(protocol.Progress(done, total))

    return report
