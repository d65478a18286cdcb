"""Writes down what each step of this rank took, by the host's clock: nothing is asked of its device."""

import time
from collections.abc import Collection

from ..parallel import comm
from ..protocol.heartbeats import Heartbeats
from ..protocol.step_times import StepRing, StepTime


class StepClock:
    """Records when each step of this rank began and ended. ``ring``: where the times go; None where nobody
    reads them. A call of Parallel Model is one step."""

    def __init__(self, ring: StepRing | None):
        self._ring = ring
        self._request = 0
        self._step: int | None = None
        self._before = (0.0, 0.0, 0)
        #: Steps of the request under way in which ranks may compile.
        self.compiling: Collection[int] = ()

    def new_request(self):
        """Count the steps to come as those of another request."""
        self._request += 1

    def begin(self, step: int | None):
        """Note that ``step`` begins, and that another one before it has ended; None: the last has."""
        if self._ring is None or step == self._step:
            return
        now = (time.monotonic(), comm.WAIT_CLOCK.seconds, sum(comm.SENT.values()))
        if self._step is not None:
            began, waited, sent = self._before
            spent = (began, now[0] - began, now[1] - waited, max(0, now[2] - sent))
            self._ring.append(StepTime(self._request, self._step, *spent))
        self._step = step
        self._before = now
        self._ring.say_compiles(step in self.compiling)

    def note_memory(self, size: int):
        """Say that this rank's allocator has ``size`` bytes of its device."""
        if self._ring is not None:
            self._ring.device_bytes = size


def noted(beats: Heartbeats | None, rank: int) -> dict:
    """Return what a rank has noted: device_bytes, and of each of its last ``steps`` [request, step, begin
    (seconds from now, negative), seconds, waited, bytes sent]; 0 and none where nobody keeps them."""
    if beats is None:
        return {"device_bytes": 0, "steps": []}
    times = beats.step_times(rank)
    now = time.monotonic()  # after all that began
    steps = [list(each._replace(begin=each.begin - now)) for each in times]
    return {"device_bytes": beats.device_bytes(rank), "steps": steps}
