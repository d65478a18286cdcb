"""Broadcast of a client's messages from rank 0 to the other ranks, over the gloo control group, in the
protocol's own frames."""

import json
import struct

import torch
import torch.distributed as dist
from torch import Tensor

from ..protocol.framing import decode, encode
from .shared_memory import SharedBuffer

#: Bytes of header, table and body, and the body's number in the shared memory; 0 where it follows by
#: broadcast.
SIZES = struct.Struct("!QQQQ")
#: Bytes of the first broadcast: these sizes, and of header and table what fits, which is nearly always all.
FIRST = 4096


class Dispatcher:
    """Broadcast messages from rank 0, and gather small values from every rank.

    Bodies go through shared memory where all ranks are on one machine. Every rank makes one at the same time.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.buffer = self._shared(dist.get_rank(group)) if self.ranks > 1 else None

    def _shared(self, rank: int) -> SharedBuffer | None:
        """Return memory that every rank has, or None."""
        buffer = address = None
        try:
            buffer, address = SharedBuffer.make(self.ranks) if rank == 0 else (None, None)
        except (OSError, AttributeError):
            pass
        address = self.all_gather_object(address)[0]
        try:
            buffer = buffer or address and SharedBuffer.join(address, self.ranks, rank)
        except (OSError, ValueError):
            pass
        return buffer if all(self.all_gather_object(buffer is not None)) else None

    def broadcast(self, message):
        """On rank 0: send ``message`` to every other rank, if there are any."""
        if self.ranks == 1:
            return
        _, header, table, *data = encode(message)
        chunks = [torch.frombuffer(chunk, dtype=torch.uint8) for chunk in data]
        number = self.buffer.write(chunks) if self.buffer and chunks else 0
        head = SIZES.pack(len(header), len(table), sum(map(len, chunks)), number) + header + table
        self._broadcast_bytes(torch.frombuffer(bytearray(head[:FIRST].ljust(FIRST)), dtype=torch.uint8))
        if len(head) > FIRST:
            self._broadcast_bytes(torch.frombuffer(bytearray(head[FIRST:]), dtype=torch.uint8))
        if chunks and not number:
            self._broadcast_bytes(
                chunks[0] if len(chunks) == 1 else torch.cat(chunks)
            )  # what came over the socket is one chunk

    def receive(self):
        """On other ranks: wait for the next message of rank 0 and return it."""
        head = self._broadcast_bytes(torch.empty(FIRST, dtype=torch.uint8)).numpy().tobytes()
        header, table, body, number = SIZES.unpack_from(head)
        size = SIZES.size + header + table
        if size > FIRST:
            head += self._broadcast_bytes(torch.empty(size - FIRST, dtype=torch.uint8)).numpy().tobytes()
        return decode(
            head[SIZES.size : SIZES.size + header], head[SIZES.size + header : size], self._body(number, body)
        )

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
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        gathered = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(gathered, padded, group=self.group)
        return [
            json.loads(data_of_rank[: int(size)].numpy().tobytes())
            for data_of_rank, size in zip(gathered, sizes)
        ]
