"""Refusals where they are seen: on the node, and in the console as one sentence."""

import logging
import time
from contextlib import contextmanager

from ...backend.client.dependencies import MissingDependencyError
from ...backend.client.status import log_of_last_backend
from ...backend.config import ConfigError
from ...backend.errors import SHORT, UnsupportedError
from ...backend.protocol import BackendError, RefusedError
from .progress import node_text

#: The latest refusal or failure, for the side panel: text, time (s since 1970), end of the backend's log.
LATEST: dict = {}
#: Characters of that log.
LOG_TAIL = 4000

#: What a user can put right: the message is a sentence that says how.
MISTAKES = (ConfigError, MissingDependencyError, RefusedError, UnsupportedError)
_NAMES = tuple(f"{SHORT}.{error.__name__}: " for error in MISTAKES)


@contextmanager
def errors_on_node():
    """Show under the node that runs now, where progress is shown, why it fails: in a ``with``, or around a
    node's ``execute``."""
    try:
        yield
    except (*MISTAKES, BackendError) as error:
        node_text()(str(error))
        log = log_of_last_backend() if isinstance(error, BackendError) else ""
        LATEST.update(text=str(error), time=time.time(), log=log[-LOG_TAIL:])
        raise


def says_more(record: logging.LogRecord) -> bool:
    """Filter a log: after the sentence of a mistake ComfyUI's has a traceback, which says nothing more."""
    text = record.msg
    if not isinstance(text, str) or not text.startswith("Traceback (most recent call last)"):
        return True
    return not text.rstrip().rpartition("\n")[2].startswith(_NAMES)
