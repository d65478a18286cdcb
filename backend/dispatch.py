"""Rank 0 tells the other ranks what to do, over the gloo control group: the client's own messages, in the protocol's own frames."""

import json
import struct

import torch
import torch.distributed as dist
from torch import Tensor

from .frames import decode, encode

#: Bytes of header, table and body.
SIZES = struct.Struct("!QQQ")
#: Bytes of the first broadcast: these sizes, and of header and table what fits, which is nearly always all.
FIRST = 4096


class Dispatcher:
    """Broadcast of messages from rank 0, and answers back."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.ranks = dist.get_world_size(group)

    def tell(self, message):
        """Rank 0: send ``message`` to every other rank, where there are some."""
        if self.ranks == 1:
            return
        _, header, table, *data = encode(message)
        parts = [torch.frombuffer(part, dtype=torch.uint8) for part in data]
        head = SIZES.pack(len(header), len(table), sum(map(len, parts))) + header + table
        self._broadcast(torch.frombuffer(bytearray(head[:FIRST].ljust(FIRST)), dtype=torch.uint8))
        if len(head) > FIRST:
            self._broadcast(torch.frombuffer(bytearray(head[FIRST:]), dtype=torch.uint8))
        if parts:
            self._broadcast(parts[0] if len(parts) == 1 else torch.cat(parts))       # what came over the socket is one part

    def hear(self):
        """Other ranks: the next message of rank 0."""
        head = self._broadcast(torch.empty(FIRST, dtype=torch.uint8)).numpy().tobytes()
        header, table, body = SIZES.unpack_from(head)
        size = SIZES.size + header + table
        if size > FIRST:
            head += self._broadcast(torch.empty(size - FIRST, dtype=torch.uint8)).numpy().tobytes()
        data = torch.empty(body, dtype=torch.uint8)
        return decode(head[SIZES.size: SIZES.size + header], head[SIZES.size + header: size], self._broadcast(data) if body else data)

    def _broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, 0, group=self.group)
        return x

    def answers(self, answer) -> list:
        """Every rank's JSON-able ``answer``, on every rank, in order of ranks."""
        data = torch.frombuffer(bytearray(json.dumps(answer).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(rows, padded, group=self.group)
        return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes)]
