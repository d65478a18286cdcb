"""Memory that the ranks of one machine share: rank 0 puts a message's body there once, and every other rank
copies it out.

Through gloo's sockets a body takes several times as long. The memory has no name in a file system: it is a
memfd, which the others open through /proc, as only processes of one user on one machine can.
"""

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
        self.file, self.ranks, self.rank, self.sent = os.fdopen(file, "r+b", buffering=0), ranks, rank, 0
        self.data = torch.frombuffer(mmap.mmap(file, HEAD + MAX_BYTES), dtype=torch.uint8)[HEAD:]

    @classmethod
    def make(cls, ranks: int) -> tuple["SharedBuffer", list]:
        """A new one, and what the other ranks must be told of it. OSError, AttributeError where this system
        has none."""
        file, sign = os.memfd_create("parallel-dit"), secrets.token_bytes(16)
        os.ftruncate(file, HEAD + MAX_BYTES)
        buffer = cls(file, ranks, 0)
        buffer.data[: len(sign)] = torch.frombuffer(bytearray(sign), dtype=torch.uint8)
        return buffer, [os.getpid(), file, sign.hex()]

    @classmethod
    def join(cls, address: list, ranks: int, rank: int) -> "SharedBuffer":
        """Rank 0's. OSError, ValueError where it is on another machine."""
        pid, file, sign = address
        buffer = cls(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR), ranks, rank)
        if buffer.data[:16].numpy().tobytes().hex() != sign:
            raise ValueError("another machine has such a file too")
        return buffer

    def write(self, chunks: list[Tensor]) -> int:
        """Rank 0: place ``parts`` (uint8) behind each other; the body's number, or 0 where it does not fit or
        some rank has not read the one before."""
        if sum(map(len, chunks)) > MAX_BYTES or any(count != self.sent for count in self._counts()):
            return 0
        at = 0
        for chunk in chunks:
            self.data[at : at + len(chunk)] = chunk
            at += len(chunk)
        self.sent += 1
        return self.sent

    def read(self, number: int, size: int) -> Tensor:
        """Another rank: the body of that number, in memory of its own."""
        body = self.data[:size].clone()
        self.confirm(number)
        return body

    def confirm(self, number: int):
        """This rank is done with that body. A call to the kernel: it is seen after what was read before."""
        os.pwrite(self.file.fileno(), COUNT.pack(number), COUNT.size * self.rank)

    def _counts(self) -> list[int]:
        """Of the other ranks."""
        return [
            count for (count,) in COUNT.iter_unpack(os.pread(self.file.fileno(), COUNT.size * self.ranks, 0))
        ][1:]
