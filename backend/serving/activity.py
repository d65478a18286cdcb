"""What rank 0 has done and does, for whoever asks how the backend is."""

import time
from collections import Counter

import psutil

from .. import protocol


class Activity:
    """Written by the ranks' thread, read by those of clients."""

    def __init__(self):
        self.last_error = ""
        self._started = time.monotonic()
        self._answered: Counter[str] = Counter()
        self._running = ("", 0.0)

    def begin(self, message):
        """The ranks begin a request."""
        self._running = (type(message).__name__, time.monotonic())

    def end(self):
        """They have answered it."""
        self._answered[self._running[0]] += 1
        self._running = ("", 0.0)

    def report(self, models: dict[str, str], ranks: list[dict], waiting: int) -> protocol.Report:
        """Return the state of now."""
        now = time.monotonic()
        kind, since = self._running
        seconds = now - since if kind else 0.0
        return protocol.Report(
            now - self._started, models, ranks, kind, seconds, waiting, dict(self._answered), self.last_error
        )


def resident(pid: int) -> int:
    """Return the bytes of memory of a process of this machine; 0 where it is on another one."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
