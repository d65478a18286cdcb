"""Ends backends that nobody has used for a while, where whoever starts ComfyUI asks for that."""

import threading
import time
from collections.abc import Callable
from functools import cache

from .durations import duration

#: Environment variable: minutes without a request after which a launched backend ends. Unset: never.
IDLE_VARIABLE = "PARALLEL_DIT_IDLE_MINUTES"
#: Most seconds between two looks.
LOOK_SECONDS = 10.0


def idle_seconds() -> float | None:
    """Return the seconds that IDLE_VARIABLE asks for, None where it does not. Raises ConfigError."""
    minutes = duration(IDLE_VARIABLE, "minutes", "to keep idle backends")
    return None if minutes is None else 60 * minutes


@cache
def watch(close_idle: Callable[[float], None]):
    """Call ``close_idle(seconds)`` now and then where IDLE_VARIABLE asks for it, on a thread of its own that
    ends with this process; once. Raises ConfigError."""
    seconds = idle_seconds()
    if seconds is None:
        return

    def look():
        while True:
            time.sleep(min(LOOK_SECONDS, seconds / 4))
            close_idle(seconds)

    threading.Thread(target=look, name="parallel-dit idle", daemon=True).start()
