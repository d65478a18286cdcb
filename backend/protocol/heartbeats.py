"""Heartbeats of the ranks of one machine: a counter each, in memory shared with who launched them. A thread
of every rank counts, apart from its work: the main thread may compute, load or wait for an hour. It needs
Python's lock (GIL) alone, which torch, files and sockets release while they work. The launcher looks whether
the counters move (client/silence.py). Standard library only."""

import itertools
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from .step_times import StepRing, StepTime

#: So long may a rank compute, load or check headers while its peers wait in a collective. Ranks that have
#: died or are silent are found in seconds, by torchrun and by their heartbeats (client/silence.py); those
#: that wait on their GPUs in minutes, by the client (client/step_timer.py).
MAX_COLLECTIVE_SECONDS = 7200
#: Seconds between two beats of a rank.
BEAT_SECONDS = 0.5
#: A rank's process id, its rank in the whole backend, its beats, and the longest time between two (ms).
SLOT = struct.Struct("=4Q")
#: Bytes of a rank: its slot, and its last steps (step_times.py), which lie after all slots.
OF_RANK = SLOT.size + StepRing.SIZE


@dataclass(frozen=True)
class Beat:
    """What one rank has written last. ``longest``: most seconds between two of its beats so far.
    ``compiles``: as in StepRing.say_compiles."""

    pid: int
    rank: int
    count: int
    longest: float
    compiles: bool = False


def _memory_file() -> int | None:
    """Return a file in memory without a name; None where the system has none, or allows none."""
    if not hasattr(os, "memfd_create") or not Path("/proc/self/fd").exists():
        return None
    try:
        return os.memfd_create("parallel-dit-heartbeats")
    except OSError:  # seccomp, or vm.memfd_noexec
        return None


class Heartbeats:
    """The slots of ``ranks`` ranks; ``make`` them in the launcher, ``join`` them in each rank."""

    def __init__(self, file: int, path: str, ranks: int):
        self.path = path
        self.ranks = ranks
        self._file = file
        self._memory = mmap.mmap(file, OF_RANK * ranks)

    @classmethod
    def make(cls, ranks: int, folder: Path) -> "Heartbeats":
        """Return new slots at a path that only this user can open: memory without a name, which waits for no
        disk, or a file in ``folder`` where the system has none. Raises OSError."""
        file = _memory_file()
        if file is not None:
            path = f"/proc/{os.getpid()}/fd/{file}"
        else:
            path = str(folder / "heartbeats")
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(file, OF_RANK * ranks)
        return cls(file, path, ranks)

    @classmethod
    def join(cls, path: str) -> "Heartbeats":
        """Open the launcher's slots. Raises OSError."""
        file = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        return cls(file, path, os.fstat(file).st_size // OF_RANK)

    def start(self, place: int, rank: int):
        """Beat in slot ``place`` for this process, which is ``rank``, as long as it lives."""
        threading.Thread(target=self._beat, args=(place, rank), name="heartbeat", daemon=True).start()

    def _beat(self, place: int, rank: int):
        longest = 0.0
        last = time.monotonic()
        for count in itertools.count(1):
            now = time.monotonic()
            longest = max(longest, now - last)
            last = now
            SLOT.pack_into(self._memory, SLOT.size * place, os.getpid(), rank, count, round(1000 * longest))
            time.sleep(BEAT_SECONDS)

    def read(self) -> list[Beat]:
        """Return the beats of every rank that has begun; none after ``close``."""
        if self._memory.closed:
            return []
        slots = SLOT.iter_unpack(self._memory[: SLOT.size * self.ranks])
        return [
            Beat(pid, rank, count, longest / 1000, StepRing.says_compiles(self._memory, self._begin(place)))
            for place, (pid, rank, count, longest) in enumerate(slots)
            if pid
        ]

    def ring(self, place: int) -> StepRing:
        """Return the last steps of slot ``place``, for its rank to write, as long as it lives."""
        begin = self._begin(place)
        return StepRing(memoryview(self._memory)[begin : begin + StepRing.SIZE])

    def _begin(self, place: int) -> int:
        return SLOT.size * self.ranks + StepRing.SIZE * place

    def step_times(self, rank: int) -> list[StepTime]:
        """Return the last steps of a rank of the whole backend; none where it has not begun, or not here."""
        return [time for ring in self._rings_of(rank) for time in ring.read()]

    def device_bytes(self, rank: int) -> int:
        """Return the bytes of its device that a rank's allocator has; 0 as step_times has none."""
        return sum(ring.device_bytes for ring in self._rings_of(rank))

    def _rings_of(self, rank: int) -> list[StepRing]:
        slots = SLOT.iter_unpack(self._memory[: SLOT.size * self.ranks])
        return [self.ring(place) for place, (pid, own, _, _) in enumerate(slots) if pid and own == rank]

    def close(self):
        """Give the memory back, more than once is fine; ranks that still beat keep theirs."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self._file)
