"""Progress of a request, told to its client: steps with previews, and the bytes of a load."""

import time
from collections.abc import Callable

from .. import protocol
from .server import Job

#: Least time between two messages about a load's progress.
LOAD_SECONDS = 0.1


class Previews:
    """Allow one preview in ``seconds``; count them, and the seconds that the ranks waited for them."""

    def __init__(self, seconds: float, clock):
        self.seconds = seconds
        self.clock = clock
        self.last = float("-inf")
        self.count = 0
        self.spent = 0.0

    def due(self) -> bool:
        """Return whether a preview is wanted now; then the next one is ``seconds`` away."""
        if not self.seconds or self.clock() - self.last < self.seconds:
            return False
        self.last = self.clock()
        return True

    @property
    def stats(self) -> dict:
        """Return their number and cost for a Result."""
        return {"previews": self.count, "preview_seconds": self.spent}


def progress(job: Job, step: int, total: int, previews: Previews, make_x0):
    """Reply that ``step`` of ``total`` steps are done, with the latest x0 where a preview is due."""
    if not (job.client_keeps_up and previews.due()):
        job.reply(protocol.Progress(step, total))
        return
    began = previews.clock()
    job.reply(protocol.Progress(step, total, {"x0": make_x0()}))
    previews.count += 1
    previews.spent += previews.clock() - began


def load_progress(job: Job) -> Callable[[int, int], None]:
    """Return a callback that reports to the client how many bytes of the file rank 0 has loaded."""
    rate = Previews(LOAD_SECONDS, time.monotonic)

    def report(done, total):
        if rate.due() or done == total:
            job.reply(protocol.Progress(done, total))

    return report
