"""Starts and ends one backend on this machine: torchrun's agent, its ranks, their private folder."""

import atexit
import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace

from ...config import ParallelConfig
from ...errors import ARRANGING, RAN_OUT
from ...protocol import BackendError, Shutdown
from ...protocol.heartbeats import Heartbeats
from ...quantization.dequantized_cache import stop_caching_dequantized
from ...runtime.callbacks import nothing
from ..client import BackendClient, HandshakeError
from ..durations import READY_SECONDS
from ..exit_report import cause_among, failures, full_disk, last_error, links_hint
from ..machines.machine_link import Link
from ..next_step import NOBODY_ASKED, failure_sentence
from ..pack_version import require_same_pack
from ..silence import CANCEL_SILENT_SECONDS, SilenceWatch, belongs_to_backend, silent_seconds
from . import fork_guard
from .agent_command import ONE_MACHINE, STORE, launch_command
from .child_process import END_SECONDS, end_process
from .private_folder import LOGS, private_folder
from .rank_environment import sanitized_environment

#: After a rank has ended, torchrun needs this long at most to end the others and to write why, also where
#: other processes want the machine: until then only what followed is known.
EXIT_REPORT_SECONDS = 20.0
#: After another machine's ranks have ended, ours have so long to see it, and clients of this address so long
#: to read why.
GRACE_SECONDS = 2.0
NOTICE_SECONDS = 1.5
#: In which ranks write the stacks of their threads.
DUMP_SECONDS = 0.3


class ClosedError(BackendError):
    """We end the backend, as at this process's end, while a thread waits for it: nothing to report."""


class _NotReady(Exception):
    """Ends wait_ready at its deadline, from inside a connection's own wait."""


class BackendProcess:
    """A backend that this process started and owns. Every rank inherits the read end of a pipe that only we
    hold open: token and configuration come through it, and ranks end when it closes, however we end. Other
    machines are told ``_gave_up`` where we have not waited for the ranks any longer."""

    def __init__(
        self,
        config: ParallelConfig,
        device: str,
        models: Iterable[str] = (),
        address: str = "",
        token: str = "",
        link: Link | None = None,
    ):
        """Start ranks on ``device`` ("cuda" or "cpu") that may load files below the folders ``models``.
        ``address``, ``token``: of other clients, if there are any. ``link``: to the other machines'
        launchers, which start theirs. Raises ConfigError, or BackendError where pack or disk forbid it."""
        require_same_pack()
        self.models = frozenset(models)
        self._link = link
        self.machines = link.machines if link is not None else ONE_MACHINE
        self._ranks = self.machines.ranks_here(config)
        self._is_served = bool(address)
        self._is_on_gpus = device == "cuda"
        self._private = private_folder()
        self.folder = self._private.path
        self.log = self.folder / "backend.log"
        LOGS.append(self.log)
        #: Which rank was found to hang, and ended with all others; empty while none was.
        self.silence = ""
        self._ended_elsewhere = False
        self._gave_up = ""
        #: Ranks that we have killed ourselves.
        self._killed: set[int] = set()
        self.heartbeats = Heartbeats.make(self._ranks, self.folder)
        self.address = address or f"unix:{self.folder / 'backend.sock'}"
        self._token = token or secrets.token_hex(32)
        self._client = None
        self._closing = self._ended = False
        self._ending = threading.RLock()
        try:
            self._agent = self._start_agent(config, device)
        except BaseException:
            self.heartbeats.close()
            self._private.close()
            raise
        assert self._agent.stdin is not None  # it was opened as a pipe
        self._pipe = self._agent.stdin
        fork_guard.hold(self._pipe)
        self._say_configuration(config, device)
        self.watch = SilenceWatch(self.heartbeats, self._end_silent, device == "cuda")
        if link is not None:
            link.watch(self._end_with_others, self.watch.limit_started)
        self._owner = os.getpid()
        atexit.register(self._close_at_exit)

    def _start_agent(self, config: ParallelConfig, device: str) -> subprocess.Popen:
        silent_seconds()  # refuses a limit that is none before anything is started
        # of several machines each uses its first GPUs
        here = config if self.machines.count == 1 else ParallelConfig(data_parallel_degree=self._ranks)
        env = sanitized_environment(dict(os.environ), here, device, self.machines.interface or "lo")
        where = (self.address, self.folder, sorted(self.models), self.heartbeats.path)
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                launch_command(config, *where, self.machines),
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                pass_fds=self._private.inherited,
            )

    def _say_configuration(self, config: ParallelConfig, device: str):
        # a line of a few hundred bytes fits into the pipe, whoever reads it (backend/rank/start.py); the
        # ranks see their own devices only, numbered from 0
        seen = replace(config, device=device, gpus="", address="")
        said = {"token": self._token if self.machines.index == 0 else "", "config": asdict(seen)}
        with suppress(BrokenPipeError):  # it has ended already: who waits for it is told why
            os.write(self._pipe.fileno(), json.dumps(said).encode() + b"\n")

    def wait_ready(self, check=nothing) -> BackendClient:
        """Return a client connected to rank 0, once every rank has joined. ``check()`` is called ten times a
        second and may raise to give up. Raises BackendError, which names the cause and the log, where the
        backend ends first, or READY_SECONDS pass without one more rank that is ready."""
        deadline = time.monotonic() + READY_SECONDS
        ready_text = self.ready_text

        def wait_on():
            nonlocal deadline, ready_text
            check()
            if self.ready_text != ready_text:
                ready_text = self.ready_text
                deadline = time.monotonic() + READY_SECONDS
            if time.monotonic() > deadline:
                raise _NotReady

        try:
            while (client := self._try_to_connect(wait_on)) is None:
                wait_on()
                time.sleep(0.1)
        except _NotReady:
            self._private.keep()
            hint = ""
            if self._started >= self._ranks:  # they wait for each other
                hint = links_hint(self._link is not None, self._is_on_gpus and self._ranks > 1)
            self._gave_up = f"it was not ready after {READY_SECONDS:.0f} s{ready_text}{hint}"
            what = f"The backend gives up: {self._gave_up}"
            raise BackendError(f"{what}; the reason may be in its log, {self.log}.") from None
        self._client = client
        self.watch.limit_started()
        if self._link is not None:
            self._link.broadcast(ready=True)
        return client

    def _try_to_connect(self, check) -> BackendClient | None:
        try:
            return self.connect_again(check)
        except OSError:  # nobody listens yet, or nobody will
            if self.running:
                return None
            raise self.failure() from None
        except HandshakeError:
            raise  # it lives, and has said why
        except BackendError as error:
            raise self.failure() from error

    @property
    def ready_text(self) -> str:
        """Say how many ranks have imported everything and wait for the others; empty for none."""
        return f": {started} of {self._ranks} ready" if (started := self._started) else ""

    @property
    def _started(self) -> int:
        return sum(1 for _ in self.folder.glob(f"{STORE}.ready-*"))

    @property
    def running(self) -> bool:
        return not (self.silence or self._ended_elsewhere) and self._agent.poll() is None

    @property
    def ended_as_asked(self) -> bool:
        """Return whether a client has told it to end."""
        return not self.silence and self._agent.poll() == 0

    def failure(self) -> BackendError:
        """Return the error for an unanswered request: the failure cause, or ClosedError where we end it."""
        if self._closing:
            return ClosedError("The backend ends with the process that started it.")
        return BackendError(self.failure_cause())

    def failure_cause(self, starts_anew: bool = False) -> str:
        """Return some sentences on why the backend ended and what to do, once torchrun has written it, or
        what the ranks have left while their processes still run. ``starts_anew``: as in failure_sentence."""
        self._private.keep()
        self._wait_for_report()
        silence = self.silence
        of_ranks = failures(self.folder, self.machines.index * self._ranks, self.machines.name)
        of_ranks = [
            each for each in of_ranks if each.rank not in self._killed or each.code != -signal.SIGKILL
        ]
        if self._link is not None:
            silence, of_ranks = self._link.conclude(silence, of_ranks)
        failure = cause_among(of_ranks)
        cause = silence or str(failure)
        if RAN_OUT in cause and ARRANGING not in cause:  # when nothing stays dequantized
            stop_caching_dequantized()
        disk = full_disk(self.folder)
        status, error = self._agent.poll(), last_error(self.folder)
        sentence = failure_sentence(silence, failure, status, error, disk, starts_anew)
        return f"{sentence}; its log is {self.log}.{disk}"

    def _wait_for_report(self):
        """Wait until torchrun has written why its ranks ended, or end those that wait for another machine's:
        ranks of NCCL may do so for hours."""
        if self.silence:
            return
        has_ended = self._wait(GRACE_SECONDS if self._ended_elsewhere else EXIT_REPORT_SECONDS)
        if self._ended_elsewhere and not has_ended:
            self._kill_ranks()

    def connect_again(self, check=nothing) -> BackendClient:
        """Return one more client of rank 0. Errors as in BackendClient."""
        return BackendClient(self.address, self._token, check, self._is_hung, self.watch.steps_of_ranks)

    def close(self):
        """End every rank: ask, close their pipe, kill what is left. Any thread may, more than once."""
        self._closing = True
        with self._ending:
            if not self._ended:
                self._end()
                self._ended = True

    def _end(self):
        atexit.unregister(self._close_at_exit)
        self.watch.stop()
        if self._link is not None and self.running:  # no client asked: the others are no success either
            self._link.broadcast(left=self._gave_up or NOBODY_ASKED)
        if self._client is not None and not self._client.closed:
            with suppress(BackendError):  # it hung up first, which is what was asked for
                self._client.send(Shutdown())
                self._wait(3)
            self._client.hang_up()  # not closed here: another thread may wait on it
        self._pipe.close()
        # those that live do not see the end of their pipe; an agent that was killed has ended none
        if self._is_hung() or not self._wait(3) or (self._agent.returncode or 0) < 0:
            self._kill_ranks()
        # where a rank was silent all are dead by now, and torchrun may be stopped, too
        if not self._wait(1 if self.silence else 3):
            end_process(self._agent, 1 if self.silence else END_SECONDS)
        if self._link is not None:
            self._link.close("" if self._agent.returncode == 0 else self._gave_up or NOBODY_ASKED)
        self.heartbeats.close()
        self._private.close()

    def _close_at_exit(self):
        if os.getpid() == self._owner:  # not of a fork, which has our handlers too
            self.close()

    def _is_hung(self) -> bool:
        """Return whether a rank has been silent for so long that nobody waits for it who wants to stop."""
        self.silence = self.silence or self.watch.silent(CANCEL_SILENT_SECONDS)
        return bool(self.silence)

    def _end_silent(self, silence: str):
        """End all ranks, one of which hangs: the others may wait for it for hours."""
        if self._closing:
            return
        self.silence = silence
        self.dump_stacks()
        time.sleep(DUMP_SECONDS)
        if self._is_served and self._client is not None and not self._client.closed:
            with suppress(BackendError):  # rank 0 tells the clients of this address, unless it hangs itself
                self._client.send(Shutdown(f"The backend ends because {silence}."))
                self._wait(NOTICE_SECONDS)  # a busy machine takes its time
        self._kill_ranks()

    def _end_with_others(self, silence: str):
        """End the ranks of this machine, since another one is ``silent``, or has ended and will say why."""
        if silence:
            self._end_silent(silence)
        self._ended_elsewhere = True

    def dump_stacks(self):
        """Have every rank write into the log where its threads are, also one that hangs in one of them."""
        self._signal_ranks(signal.SIGUSR1)

    def _kill_ranks(self):
        self._killed |= self._signal_ranks(signal.SIGKILL)

    def _signal_ranks(self, number: int) -> set[int]:
        """Signal the ranks that live: processes whose command line has our folder, whose name is random."""
        living = set()
        for beat in self.heartbeats.read():
            if belongs_to_backend(beat.pid, self.folder):
                with suppress(ProcessLookupError):
                    os.kill(beat.pid, number)
                    living.add(beat.rank)
        return living

    def _wait(self, seconds: float) -> bool:
        try:
            self._agent.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
