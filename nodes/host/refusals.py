"""Refusals where they are seen: on the node, and in the console as one sentence."""

import logging
import time
from contextlib import contextmanager

from ...backend.client.launching.dependencies import MissingDependencyError
from ...backend.client.status import log_of_last_backend
from ...backend.config import ConfigError
from ...backend.errors import SHORT, UnsupportedError
from ...backend.protocol import BackendError, RefusedError
from .progress import node_text

#: The latest refusal or failure, for the side panel: text, time (s since 1970), end of the backend's log, and
#: whether it is past: a sampling has succeeded since.
LATEST: dict = {}
#: Characters of that log.
LOG_TAIL = 4000
#: What torchrun's own traceback begins and ends with, after all that ranks have written.
_TRACEBACK, _OF_TORCHRUN = "Traceback (most recent call last):", "ChildFailedError"

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
        LATEST.update(text=str(error), time=time.time(), log=_excerpt(log), past=False)
        raise


def note_success():
    """Note that a sampling has succeeded: the latest error, if any, is of a run before it."""
    if LATEST:
        LATEST.update(past=True)


def _excerpt(log: str) -> str:
    """Return the last whole lines of a log, without torchrun's traceback: the error's text says more."""
    ended = log.rfind(_OF_TORCHRUN)
    begun = log.rfind(_TRACEBACK, 0, max(0, ended))
    if begun >= 0:
        log = log[: log.rfind("\n", 0, begun) + 1]
    return log if len(log) <= LOG_TAIL else log[-LOG_TAIL:].partition("\n")[2]


def says_more(record: logging.LogRecord) -> bool:
    """Filter a log: after the sentence of a mistake ComfyUI's has a traceback, which says nothing more."""
    text = record.msg
    if not isinstance(text, str) or not text.startswith("Traceback (most recent call last)"):
        return True
    return not text.rstrip().rpartition("\n")[2].startswith(_NAMES)
