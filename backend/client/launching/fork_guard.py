"""Keeps pipes, sockets and locks that processes of ours live by out of forks of this one. What another custom
node forks (concurrent.futures, multiprocessing) has a copy of each, and close-on-exec does not act: ranks
would not see their pipe end with ComfyUI, and hold the GPUs as long as that lives. Standard library only."""

import os
from contextlib import suppress
from typing import Any
from weakref import WeakSet

_held: WeakSet[Any] = WeakSet()


def hold(file: Any):
    """Have forks from now on without this file or socket, as long as it is open."""
    _held.add(file)


def _in_child():
    """Replace each held file by /dev/null in a forked child: objects there still close the number."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in list(_held):
        with suppress(ValueError, OSError):  # it is closed
            os.dup2(nothing, file.fileno(), inheritable=False)
    os.close(nothing)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
