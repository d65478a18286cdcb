"""With this folder in PYTHONPATH, torchrun forks the ranks of this pack from its agent, which has imported
everything once, where each rank would import it for seconds. Command lines, signals, pipes and exit codes are
those of processes that were started anew; Python's hash seed is the same on all ranks. Python itself imports
this file as it starts (the documentation of ``site``)."""

import gc
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

PACK = Path(__file__).parents[3]
AGENT = ["-m", "torch.distributed.run"]
#: Signals that torchrun handles in its agent.
HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


class Fork:
    """A forked rank, with what torchrun uses of subprocess.Popen."""

    def __init__(self, command: list[str], environment: dict[str, str], stdout, stderr):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # files of the agent, which are closed here, are not closed again
            _become(command, environment, stdout, stderr)

    def poll(self) -> int | None:
        """The exit code, as of Popen, or None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code, or subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return code


def _become(command: list[str], environment: dict[str, str], stdout, stderr):
    """Be the process of ``command``, python -u -m MODULE ...; does not return."""
    os.setsid()
    for name in HANDLED:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in ((1, stdout), (2, stderr)):
        if file is not None:
            os.dup2(file.fileno(), number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    at = command.index("-m") + 1
    sys.argv = command[at:]
    try:
        runpy.run_module(command[at], run_name="__main__", alter_sys=True)  # which ends this process
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _fork_ranks():
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    import backend.worker  # noqa: F401  # once, for all ranks

    def forked(self, args: tuple, env: dict[str, str]) -> Fork:
        return Fork(list(args), env, self._stdout, self._stderr)

    SubprocessHandler._popen = forked  # pyright: ignore[reportAttributeAccessIssue]  # what it uses of one


def _is_of_this_pack() -> bool:
    """Not of another one, in which a test wants to see a rank fail."""
    found = importlib.util.find_spec("backend")
    return found is not None and Path(str(found.origin)).parents[1] == PACK


if sys.orig_argv[1:3] == AGENT and sys.platform == "linux" and _is_of_this_pack():
    _fork_ranks()
