"""A shared-memory buffer of the ranks of one machine: rank 0 writes a message's body, the others copy it out.
gloo's sockets take several times as long. The memory is a memfd without a name, which the others open through
/proc, as only processes of one user on one machine can."""

import mmap
import os
import secrets
import struct

import torch
from torch import Tensor

#: Longer bodies go by broadcast. Memory is taken as it is first written to.
MAX_BYTES = 1 << 26
#: Bytes in front, of the number of the last body that each rank has copied out.
HEAD = 1 << 16
COUNT = struct.Struct("!Q")


class SharedBuffer:
    """One body at a time; ``make`` it on rank 0, ``join`` it on the others."""

    def __init__(self, file: int, ranks: int, rank: int):
        self.file = os.fdopen(file, "r+b", buffering=0)
        self.ranks = ranks
        self.rank = rank
        self.sent = 0
        self.data = torch.frombuffer(mmap.mmap(file, HEAD + MAX_BYTES), dtype=torch.uint8)[HEAD:]

    @classmethod
    def make(cls, ranks: int) -> tuple["SharedBuffer", list]:
        """Return a new buffer and the address that the other ranks ``join``: [pid, file, signature]. Raises
        OSError or AttributeError where this system has no memfd."""
        file = os.memfd_create("parallel-dit")
        sign = secrets.token_bytes(16)
        os.ftruncate(file, HEAD + MAX_BYTES)
        buffer = cls(file, ranks, 0)
        buffer.data[: len(sign)] = torch.frombuffer(bytearray(sign), dtype=torch.uint8)
        return buffer, [os.getpid(), file, sign.hex()]

    @classmethod
    def join(cls, address: list, ranks: int, rank: int) -> "SharedBuffer":
        """Open rank 0's buffer. Raises OSError or ValueError where it is on another machine."""
        pid, file, sign = address
        buffer = cls(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR), ranks, rank)
        if buffer.data[:16].numpy().tobytes().hex() != sign:
            raise ValueError("another machine has such a file too")
        return buffer

    def write(self, chunks: list[Tensor]) -> int:
        """Write, on rank 0, ``chunks`` (uint8) one after the other; return the body's number, or 0 where it
        does not fit or some rank has not read the last body."""
        size = sum(map(len, chunks))
        if size > MAX_BYTES or any(count != self.sent for count in self._counts()):
            return 0
        torch.cat(chunks, out=self.data[:size])
        self.sent += 1
        return self.sent

    def read(self, number: int, size: int) -> Tensor:
        """Copy, on another rank, the body of that number, of ``size`` bytes."""
        body = self.data[:size].clone()
        # a system call, so no earlier read is reordered after it
        os.pwrite(self.file.fileno(), COUNT.pack(number), COUNT.size * self.rank)
        return body

    def _counts(self) -> list[int]:
        """Return the number of the last body that each other rank has read."""
        counts = os.pread(self.file.fileno(), COUNT.size * self.ranks, 0)
        return [count for (count,) in COUNT.iter_unpack(counts)][1:]
