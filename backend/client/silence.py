"""Finds a rank whose heartbeats have stopped: its process is stopped, or hangs where no thread of it can run.
Looks are counted, not seconds: where this process was stopped itself, as by a suspended machine, nobody is
blamed for it."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from ..protocol.heartbeats import Beat, Heartbeats
from ..units import ranks_text
from .durations import duration

#: Seconds between two looks.
LOOK_SECONDS = 0.5
#: A rank without a beat for this long is silent. The longest that a healthy one was kept from its beat, by a
#: call that holds the GIL, is in docs/reliability.md.
SILENT_SECONDS = 10.0
#: Sets SILENT_SECONDS, for whoever stops a rank in a debugger.
VARIABLE = "PARALLEL_DIT_SILENT_SECONDS"
#: While ranks start: creating contexts on many GPUs may hold the GIL for long.
START_SECONDS = 60.0
#: Somebody waits for Cancel, and ends a rank that is silent for this long.
CANCEL_SILENT_SECONDS = 3.0
#: On a GPU a process that is not stopped has so many times as long, up to MAX_SECONDS: where a GPU waits
#: for a peer, the host goes on until CUDA's queue of kernels is full, and then waits in a launch, which holds
#: the GIL where inductor or comfy-kitchen launches.
GPU_PATIENCE, MAX_SECONDS = 12.0, 120.0
#: And so many times as long again in steps that compile, up to step_timer.COMPILED_SECONDS: what has compiled
#: waits so for peers that still do, in a load of kernels too.
COMPILING = 10.0
#: State in /proc/PID/stat -> what it means.
STATES = {
    "T": "its process is stopped, as by SIGSTOP or a debugger",
    "t": "its process is stopped by a debugger",
    "D": "its process waits for a device or a disk and cannot be interrupted",
}
#: Of these, those in which a process waits for nothing that ends by itself.
STOPPED = ("T", "t")
RUNS = "its process runs, but none of its Python threads do"


def silent_seconds() -> float:
    """Return the seconds after which a rank is silent. Raises ConfigError."""
    return duration(VARIABLE, "seconds", f"for {SILENT_SECONDS:g}") or SILENT_SECONDS


class SilenceWatch:
    """Looks at heartbeats until ``stop``; ``report`` gets one sentence on the ranks that are silent, once.
    Raises ConfigError where the environment has no limit."""

    def __init__(self, heartbeats: Heartbeats, report: Callable[[str], None], on_gpus: bool = False):
        self.heartbeats = heartbeats
        self.on_gpus = on_gpus
        self.limit = START_SECONDS
        self._limit_once_started = silent_seconds()
        self._report = report
        self._seen: dict[int, tuple[Beat, int]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat watch", daemon=True)
        self._thread.start()

    def limit_started(self):
        """Apply the shorter limit: the ranks have started."""
        self.limit = self._limit_once_started

    def stop(self):
        """End the looks, and wait for the one under way."""
        self._stopped.set()
        self._thread.join()

    def _watch(self):
        while not self._stopped.wait(LOOK_SECONDS):
            self._look()
            silent = self.silent(self.limit)
            if silent:
                self._report(silent)
                return

    def _look(self):
        for beat in self.heartbeats.read():
            before, looks = self._seen.get(beat.rank, (beat, 0))
            self._seen[beat.rank] = (beat, looks + 1 if before.count == beat.count else 0)

    def silent(self, seconds: float) -> str:
        """Return what is known of the ranks that have not beaten for ``seconds``; empty where all have, or
        have ended, which is for torchrun to tell."""
        sentences = []
        for beat, looks in list(self._seen.values()):
            state = process_state(beat.pid)
            patience = self._patience(seconds, state, beat.compiles)
            if looks * LOOK_SECONDS >= patience and state not in ("Z", "X", ""):
                known = STATES.get(state, RUNS)
                sentences.append(
                    f"rank {beat.rank} has been silent for {looks * LOOK_SECONDS:.0f} s ({known})"
                )
        return " and ".join(sentences)

    def steps_of_ranks(self, done: int) -> str:
        """Say in which step of a request, of which ``done`` steps have ended, each rank here is."""
        ranks = [beat.rank for beat in self.heartbeats.read()]
        last = {rank: times[-1] for rank in ranks if (times := self.heartbeats.step_times(rank))}
        newest = max((time.request for time in last.values()), default=0)
        steps: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            ended = done and rank in last and last[rank].request == newest
            steps.setdefault(last[rank].step + 2 if ended else 1, []).append(rank)
        return " and ".join(f"{ranks_text(each)} in step {step}" for step, each in steps.items())

    def _patience(self, seconds: float, state: str, compiles: bool) -> float:
        """Return for how long a rank in this state may be silent where the limit is ``seconds``."""
        if not self.on_gpus or state in STOPPED:
            return seconds
        patience = min(GPU_PATIENCE * seconds, MAX_SECONDS)
        return max(seconds, patience * COMPILING if compiles else patience)


def process_state(pid: int) -> str:
    """Return a process's state letter in /proc; empty where there is none, "R" where /proc does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "" if Path("/proc/self/stat").exists() else "R"
    except OSError:  # no descriptor is left, say: the next look tells more
        return "R"


def belongs_to_backend(pid: int, folder: Path) -> bool:
    """Return whether the process is one of the backend in ``folder``. Its number may be another's by now."""
    try:
        return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return not Path("/proc/self/stat").exists()
