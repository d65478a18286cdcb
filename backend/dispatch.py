"""Rank 0 tells the other ranks what to do, over the gloo control group: the client's own messages, in the protocol's own frames."""

import json

import torch
import torch.distributed as dist

from .protocol import PREFIX, decode, encode


class Dispatcher:
    """Broadcast of messages from rank 0, and answers back."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.ranks = dist.get_world_size(group)

    def tell(self, message):
        """Rank 0: send ``message`` to every other rank."""
        frame = b"".join(encode(message))
        dist.broadcast(torch.tensor([len(frame)]), 0, group=self.group)
        dist.broadcast(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 0, group=self.group)

    def hear(self):
        """Other ranks: the next message of rank 0."""
        size = torch.zeros(1, dtype=torch.long)
        dist.broadcast(size, 0, group=self.group)
        frame = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(frame, 0, group=self.group)
        data = frame.numpy().tobytes()
        _, header, _ = PREFIX.unpack_from(data)
        start = PREFIX.size + header
        return decode(data[PREFIX.size: start], data[start:])

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
