"""Ends a rank with the process that has started it, however that ended. Standard library only. Standard input
is a pipe whose other end the launcher alone holds: it closes with the launcher."""

import os
import re
import select
import signal
import threading
from contextlib import suppress

#: From here on Linux signals the end of a pipe alone; before, also when any one of its readers closes it, as
#: a rank does that ends by itself: its peers would be killed before torchrun knows why.
LINUX = (5, 6)


def end_with_parent():
    """End when standard input's pipe does, by a thread. The exit status is an error's, so that torchrun ends
    a peer that is stopped and cannot see it."""

    def watch():
        pipe = select.poll()
        pipe.register(0, 0)  # no read: the bytes in it are rank 0's
        pipe.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def be_killed_with_parent():
    """Have Linux kill this process when the pipe ends, also where it is stopped, or no thread of it runs:
    where all ranks wait in launches of kernels, which hold the GIL, none would see it, and torchrun waits for
    them. Not before all that is written to the pipe has been: that would kill it, too. Older kernels than
    LINUX leave it to ``end_with_parent``."""
    if not signals_the_end_alone(os.uname().release):
        return
    with suppress(ImportError, AttributeError, OSError):  # another system, or no /proc
        import fcntl

        # opened again: what is inherited is one description for all ranks, which has one owner
        own = os.open("/proc/self/fd/0", os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


def signals_the_end_alone(release: str) -> bool:
    """Return whether a kernel, named as by uname, signals the end of a pipe and nothing else."""
    version = re.match(r"(\d+)\.(\d+)", release)
    return version is not None and tuple(map(int, version.groups())) >= LINUX
