"""Broadcast of clients' messages from rank 0 to the other ranks, in the protocol's frames, over gloo."""

import json
import struct
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from ..protocol.framing import decode, encode
from .shared_memory import SharedBuffer

#: Bytes of header, table and body, and the body's number in shared memory; 0: it follows by broadcast.
SIZES = struct.Struct("!QQQQ")
#: Bytes of the first broadcast: sizes, and of header and table what fits, which is nearly always all.
FIRST = 4096


class ControlChannel:
    """Broadcast messages from rank 0, and gather small values from every rank. Bodies go through shared
    memory where all ranks are on one machine. Every rank makes one at the same time."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.buffer = self._shared() if self.ranks > 1 else None

    def _shared(self) -> SharedBuffer | None:
        """Return memory that every rank has, or None."""
        buffer = None
        address = None
        with suppress(OSError, AttributeError):
            if self.rank == 0:
                buffer, address = SharedBuffer.make(self.ranks)
        address = self.all_gather_object(address)[0]
        if buffer is None and address:
            with suppress(OSError, ValueError):
                buffer = SharedBuffer.join(address, self.ranks, self.rank)
        return buffer if all(self.all_gather_object(buffer is not None)) else None

    def broadcast(self, message):
        """Send ``message`` from rank 0 to every other rank, if there are any."""
        if self.ranks == 1:
            return
        _, header, table, *data = encode(message)
        chunks = [torch.frombuffer(chunk, dtype=torch.uint8) for chunk in data]
        number = self.buffer.write(chunks) if self.buffer and chunks else 0
        head = SIZES.pack(len(header), len(table), sum(map(len, chunks)), number) + header + table
        self._broadcast_bytes(_as_tensor(head[:FIRST].ljust(FIRST)))
        if len(head) > FIRST:
            self._broadcast_bytes(_as_tensor(head[FIRST:]))
        if chunks and not number:  # what came over the socket is one chunk
            self._broadcast_bytes(chunks[0] if len(chunks) == 1 else torch.cat(chunks))

    def receive(self):
        """Wait for the next message of rank 0, and return it; for the other ranks."""
        head = self._broadcast_bytes(torch.empty(FIRST, dtype=torch.uint8)).numpy().tobytes()
        header, table, body, number = SIZES.unpack_from(head)
        size = SIZES.size + header + table
        if size > FIRST:
            head += self._broadcast_bytes(torch.empty(size - FIRST, dtype=torch.uint8)).numpy().tobytes()
        table_start = SIZES.size + header
        return decode(head[SIZES.size : table_start], head[table_start:size], self._body(number, body))

    def _body(self, number: int, size: int) -> Tensor:
        if number:
            assert self.buffer is not None  # rank 0 numbers bodies only where every rank has the memory
            return self.buffer.read(number, size)
        data = torch.empty(size, dtype=torch.uint8)
        return self._broadcast_bytes(data) if size else data

    def _broadcast_bytes(self, x: Tensor) -> Tensor:
        dist.broadcast(x, 0, group=self.group)
        return x

    def all_gather_object(self, value) -> list:
        """Gather every rank's ``value`` (anything that JSON holds) on every rank, in order of ranks."""
        return all_gather_object(value, self.group)

    def all_gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Gather as many integers of every rank, in order of ranks: one collective."""
        own = torch.tensor(numbers)
        if self.ranks == 1:
            return [numbers]
        gathered = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(gathered, own, group=self.group)
        return [each.tolist() for each in gathered]


def all_gather_object(value, group: dist.ProcessGroup | None) -> list:
    """Gather every rank's ``value`` (anything that JSON holds) on every rank of ``group``, in their order."""
    ranks = dist.get_world_size(group)
    text = json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    padded = _as_tensor(text.ljust(int(max(sizes))))  # JSON may end with spaces
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(each.numpy().tobytes()) for each in gathered]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
