"""The few verbs of communication between ranks of one axis. Every byte that the engine sends on them is
counted by mechanism."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis

#: Bytes sent by this rank since the request began, by mechanism (ulysses, ring, tensor, pipeline, cfg,
#: outputs, modulation, sums, surroundings).
SENT: Counter[str] = Counter()


def count(mechanism: str, sent: Tensor | int):
    """Add the bytes of ``sent`` to the account of ``mechanism``."""
    size = sent if isinstance(sent, int) else sent.numel() * sent.element_size()
    if size:
        SENT[mechanism] += size


def all_to_all(parts: list[Tensor], shapes: list[tuple], axis: Axis, mechanism: str) -> list[Tensor]:
    """All-to-all of differently shaped parts: ``parts[i]`` goes to rank i of ``axis``; the answer's i-th
    tensor, of ``shapes[i]``, came from it."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = flat.new_empty(sum(sizes))
    dist.all_to_all_single(received, flat, sizes, [part.numel() for part in parts], group=axis.group)
    count(mechanism, (flat.numel() - parts[axis.rank].numel()) * flat.element_size())
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes)]


def broadcast(x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """``x`` of the first rank on all ranks of ``axes``, which may be overwritten."""
    for axis in axes:
        if axis.size > 1:
            dist.broadcast(x, axis.ranks[0], group=axis.group)
    return x


def cat(parts: list[Tensor], dim: int = 0) -> Tensor:
    """torch.cat, which copies where there is one part too."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def all_gather(x: Tensor, shapes: list[tuple], axis: Axis, mechanism: str) -> list[Tensor]:
    """Every rank's tensor, of ``shapes[i]``, on every rank; point to point, since gloo's all_gather wants
    equal sizes and is slower."""
    if axis.size == 1:
        return [x]
    x = x.contiguous()
    parts = [x if i == axis.rank else x.new_empty(shape) for i, shape in enumerate(shapes)]
    operations = []
    for offset in range(1, axis.size):
        source = (axis.rank - offset) % axis.size
        if x.numel():
            operations.append(dist.P2POp(dist.isend, x, axis.neighbour(offset), axis.group))
            count(mechanism, x)
        if parts[source].numel():
            operations.append(dist.P2POp(dist.irecv, parts[source], axis.ranks[source], axis.group))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return parts


def gather(x: Tensor, axis: Axis, mechanism: str) -> Tensor:
    """Every rank's ``x``, all of one shape, behind each other on the first rank of ``axis``; the others keep
    their own."""
    if axis.size == 1:
        return x
    if not axis.first:
        count(mechanism, x)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x.contiguous(), axis.ranks[0], axis.group)]
        ):
            work.wait()
        return x
    whole = x.new_empty(axis.size * len(x), *x.shape[1:])
    own, *others = whole.split(len(x))
    waiting = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, part, source, axis.group) for part, source in zip(others, axis.ranks[1:])]
    )
    own.copy_(x)
    for work in waiting:
        work.wait()
    return whole


def all_reduce(x: Tensor, axis: Axis, mechanism: str) -> Tensor:
    """The sum of every rank's ``x`` over ``axis``, the same on each; ``x`` may be overwritten."""
    if x.device.type == "cpu":
        return _all_reduce_pieces(x, axis, mechanism)
    dist.all_reduce(x, group=axis.group)
    count(mechanism, 2 * (axis.size - 1) * x.numel() * x.element_size() // axis.size)
    return x


def _all_reduce_pieces(x: Tensor, axis: Axis, mechanism: str) -> Tensor:
    """As gloo's all_reduce, piece by piece: every rank sums one piece and hands it round. The same bytes,
    several times as fast on gloo."""
    pieces = list(x.contiguous().view(-1).tensor_split(axis.size))
    own = [pieces[axis.rank].shape] * axis.size
    total = torch.stack(all_to_all(pieces, own, axis, mechanism)).sum(dim=0)
    return torch.cat(all_gather(total, [piece.shape for piece in pieces], axis, mechanism)).view(x.shape)


class Pipe:
    """A one-way stream of tensors between two ranks of a group: receives may be posted ahead, sends are kept
    until they are done.

    A dropped handle of an isend loses the message on gloo, so sends stay here until completed.
    """

    def __init__(self, group: dist.ProcessGroup, mechanism: str):
        self.group, self.mechanism = group, mechanism
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.posted: list[tuple[dist.Work, Tensor]] = []

    def send(self, x: Tensor, to: int):
        """Send ``x`` to global rank ``to`` without waiting for it."""
        x = x.contiguous()
        self.sending = [(work, tensor) for work, tensor in self.sending if not work.is_completed()]
        self.sending.append((dist.isend(x, to, group=self.group), x))
        count(self.mechanism, x)

    def post(self, shape: tuple, dtype: torch.dtype, device: torch.device, source: int):
        """Make ready for the next tensor from global rank ``source``."""
        buffer = torch.empty(shape, dtype=dtype, device=device)
        self.posted.append((dist.irecv(buffer, source, group=self.group), buffer))

    def take(self) -> Tensor:
        """The oldest tensor that was posted for, once it is here."""
        work, buffer = self.posted.pop(0)
        work.wait()
        return buffer

    def drain(self):
        """Wait for everything under way."""
        while self.posted:
            self.take()
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()
