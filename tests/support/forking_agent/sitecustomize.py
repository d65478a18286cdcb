"""With this folder in PYTHONPATH, torchrun forks the ranks of this pack from its agent, which has imported
everything once, where each rank would import it for seconds. Signals, pipes, sessions and exit codes are
those of processes that were started anew. /proc shows the agent's command line for them, and Python's hash
seed is the same on all ranks: tests for which that matters use real_launches. Python itself imports this file
as it starts (the documentation of ``site``)."""

import gc
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

PACK = Path(__file__).parents[3]
AGENT = ["-m", "torch.distributed.run"]
#: Signals that torchrun handles in its agent.
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Fork:
    """A forked rank, with what torchrun uses of subprocess.Popen."""

    def __init__(self, command: list[str], environment: dict[str, str], stdout, stderr):
        self.returncode: int | None = None
        begun, begins = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        self.pid = os.fork()
        if self.pid == 0:
            _be(command, environment, stdout, stderr, begins)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        os.close(begins)
        os.read(begun, 1)  # until it has a session of its own, as after Popen, or has ended
        os.close(begun)

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


def _be(command: list[str], environment: dict[str, str], stdout, stderr, begins: int):
    """Be the process of ``command``, python -u -m MODULE ...; does not return."""
    code: int | str | None = 1
    try:
        gc.freeze()  # files of the agent, which are closed here, are not closed again
        os.setsid()
        for each in HANDLED:
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        os.write(begins, b".")
        for number, file in ((1, stdout), (2, stderr)):
            if file is not None:
                os.dup2(file.fileno(), number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout = open(1, "w", buffering=1, closefd=False)
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
        at = command.index("-m") + 1
        sys.argv = command[at:]
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # it was imported once
        runpy.run_module(command[at], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    os._exit(code if isinstance(code, int) else int(code is not None))


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
