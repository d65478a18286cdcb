"""Keeps descriptors that processes of ours live by out of forks of this one. What another custom node forks
(concurrent.futures, multiprocessing) has a copy of each, and close-on-exec does not act: ranks would not see
their pipe end with ComfyUI, and hold the GPUs as long as that lives. Standard library only."""

import os

_held: set[int] = set()


def hold(descriptor: int):
    """Have forks from now on without this descriptor."""
    _held.add(descriptor)


def let_go(descriptor: int):
    """Forget a descriptor that is about to be closed, whose number may become another's."""
    _held.discard(descriptor)


def _in_child():
    """Replace each held descriptor by /dev/null in a forked child: objects there still close the number."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _held:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
