"""When each rank computed its last steps, how long it waited in them for others, what it sent, and what its
allocator has: a ring of records for each rank, in the memory of its heartbeats. The rank waits for nobody,
and rank 0 reads those of all ranks while they work. Standard library only."""

import mmap
import struct
from collections.abc import Iterator
from typing import NamedTuple

#: How many records have been written.
COUNT = struct.Struct("=Q")
#: Bytes of the device that the rank's allocator has.
DEVICE_BYTES = struct.Struct("=Q")
#: Whether the step under way may compile.
COMPILES = struct.Struct("=?7x")
#: A StepTime.
RECORD = struct.Struct("=2Q3dQ")
#: How many of a rank's latest records stay.
RECORDS = 64


class StepTime(NamedTuple):
    """One step of one rank, as its host saw it: a GPU may still compute what the host has queued. ``begin``:
    of this machine's monotonic clock (s), the same for all its ranks. ``waited``: seconds in which the host
    waited for tensors of other ranks; ``sent``: bytes. ``request`` counts the requests of the rank."""

    request: int
    step: int
    begin: float
    seconds: float
    waited: float
    sent: int


class StepRing:
    """The last steps of one rank in ``memory``, SIZE bytes of zeros at first; written by that rank alone."""

    HEADER = COUNT.size + DEVICE_BYTES.size + COMPILES.size
    SIZE = HEADER + RECORDS * RECORD.size

    def __init__(self, memory: memoryview):
        self._memory = memory

    @property
    def device_bytes(self) -> int:
        """Bytes of the device that the rank's allocator has, used or not; 0 before it says so."""
        return DEVICE_BYTES.unpack_from(self._memory, COUNT.size)[0]

    @device_bytes.setter
    def device_bytes(self, size: int):
        DEVICE_BYTES.pack_into(self._memory, COUNT.size, size)

    def say_compiles(self, value: bool):
        """Say whether the step under way may compile, or wait for ranks that do."""
        COMPILES.pack_into(self._memory, COUNT.size + DEVICE_BYTES.size, value)

    @staticmethod
    def says_compiles(memory: mmap.mmap, begin: int) -> bool:
        """Return what ``say_compiles`` has said in the ring that begins there, by no view that lasts."""
        return COMPILES.unpack_from(memory, begin + COUNT.size + DEVICE_BYTES.size)[0]

    def append(self, time: StepTime):
        """Write a record over the oldest one, then count it."""
        (count,) = COUNT.unpack_from(self._memory)
        RECORD.pack_into(self._memory, self._place(count), *time)
        COUNT.pack_into(self._memory, 0, count + 1)

    def read(self) -> Iterator[StepTime]:
        """Yield the records, oldest first, without the one that may be written over now."""
        (count,) = COUNT.unpack_from(self._memory)
        for index in range(max(0, count - RECORDS + 1), count):
            yield StepTime(*RECORD.unpack_from(self._memory, self._place(index)))

    @staticmethod
    def _place(index: int) -> int:
        return StepRing.HEADER + index % RECORDS * RECORD.size
