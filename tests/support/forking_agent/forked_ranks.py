"""torchrun's ranks as forks of its agent, which has imported everything once, where each rank would import it
for seconds. Signals, pipes, sessions and exit codes are those of processes that were started anew."""

import gc
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path

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
            _be_rank(command, environment, stdout, stderr, begins)
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


def _be_rank(command: list[str], environment: dict[str, str], stdout, stderr, begins: int):
    """Be the process of ``command``, python -u ...; does not return."""
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
    os._exit(exit_code_of(command, environment))


def exit_code_of(command: list[str], environment: dict[str, str]) -> int:
    """Run ``command``, [PYTHON, ..., "-m", MODULE, ...], [PYTHON, "-c", TEXT] or [PYTHON, ..., SCRIPT, ...],
    in this process with its open files 0 to 2."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [place for place in _places(environment) if place not in sys.path]
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # it was imported once
    code: int | str | None = 0
    try:
        _run(command)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    return code if isinstance(code, int) else int(code is not None)


def _run(command: list[str]):
    """As Python does: options, "-m" or "-c" the last of them, then what to run and its arguments."""
    at = next(i for i, word in enumerate(command) if i and not word.startswith("-"))
    sys.argv = command[at:]
    if command[at - 1] == "-m":
        runpy.run_module(command[at], run_name="__main__", alter_sys=True)
        return
    if command[at - 1] == "-c":
        sys.argv[0] = "-c"
        exec(compile(command[at], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.path[0] = str(Path(command[at]).parent)
    runpy.run_path(command[at], run_name="__main__")


def is_of_this_pack(environment: Mapping[str, str]) -> bool:
    """Are ranks of this environment of this pack, and not of another one, in which a test wants to see a rank
    fail?"""
    places = map(Path, _places(environment))
    first = next((place for place in places if (place / "backend").is_dir()), None)
    return first is not None and first.resolve() == Path(__file__).resolve().parents[3]


def _places(environment: Mapping[str, str]) -> list[str]:
    return [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]


def fork_ranks():
    """Have torchrun fork the ranks of this process that are of this pack."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    import backend.worker  # noqa: F401  # once, for all ranks

    started = SubprocessHandler._popen

    def forked(self, args: tuple, env: dict[str, str]) -> Fork | subprocess.Popen:
        if not is_of_this_pack(env):
            return started(self, args, env)
        return Fork(list(args), env, self._stdout, self._stderr)

    SubprocessHandler._popen = forked  # pyright: ignore[reportAttributeAccessIssue]  # what it uses of one
