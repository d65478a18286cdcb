"""The collectives between ranks of one axis, under torch's names; the bytes sent are counted by mechanism."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis, all_gather_single, require_work

#: Bytes sent by this rank since the request began, by mechanism (ulysses, ring, tensor, pipeline, cfg,
#: outputs, modulation, linear-attention state, halo, scales).
SENT: Counter[str] = Counter()


class WaitClock:
    """Sums the seconds that this rank's host waits for tensors of others, as a context. gloo waits there;
    NCCL hands the wait on to the GPU, and the host goes on."""

    def __init__(self):
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self):
        self._since = time.perf_counter()

    def __exit__(self, *error):
        self.seconds += time.perf_counter() - self._since


#: Of this rank since it started.
WAIT_CLOCK = WaitClock()


def count(mechanism: str, size: int):
    """Add ``size`` bytes to what this rank has sent by ``mechanism``."""
    if size:
        SENT[mechanism] += size


def all_to_all(
    chunks: list[Tensor], shapes: Sequence[tuple[int, ...]], axis: Axis, mechanism: str
) -> list[Tensor]:
    """Send ``chunks[i]``, of any shape, to rank i; return what came, of ``shapes[i]`` from rank i."""
    flat = torch.cat([chunk.reshape(-1) for chunk in chunks])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = begin_all_to_all(flat, [chunk.numel() for chunk in chunks], sizes, axis, mechanism)()
    return [chunk.view(shape) for chunk, shape in zip(received.split(sizes), shapes)]


def begin_all_to_all(
    flat: Tensor, sent: list[int], sizes: list[int], axis: Axis, mechanism: str
) -> Callable[[], Tensor]:
    """Begin to send ``sent[i]`` of the numbers in ``flat`` to rank i, in this order, and to receive
    ``sizes[i]`` numbers from rank i. Return what waits for them, once, and returns them in one tensor.
    ``flat`` is held until then: the stream goes on after the collective, so its memory may be used again.
    """
    received = flat.new_empty(sum(sizes))
    work = dist.all_to_all_single(received, flat, sizes, sent, group=axis.group, async_op=True)
    count(mechanism, (flat.numel() - sent[axis.rank]) * flat.element_size())
    under_way = [(require_work(work), flat, received)]

    def end() -> Tensor:
        assert under_way, "an all-to-all is waited for once"
        work, _, received = under_way.pop()
        with WAIT_CLOCK:
            work.wait()
        return received

    return end


def broadcast(x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """Return ``x`` of the first rank on all ranks of ``axes``; ``x`` may be overwritten."""
    for axis in axes:
        if axis.size > 1:
            with WAIT_CLOCK:
                dist.broadcast(x, axis.ranks[0], group=axis.group)
    return x


def cat_or_same(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors; return a single one itself, where torch.cat would copy it."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def all_gather(x: Tensor, shapes: Sequence[tuple[int, ...]], axis: Axis, mechanism: str) -> list[Tensor]:
    """Return every rank's tensor, of ``shapes[i]``; gloo's all_gather is slower, and wants equal sizes."""
    if axis.size == 1:
        return [x]
    x = x.contiguous()
    if x.device.type != "cpu" and all(tuple(shape) == tuple(x.shape) for shape in shapes):
        return gather_equal(x, axis, mechanism)
    gathered = [x if i == axis.rank else x.new_empty(shape) for i, shape in enumerate(shapes)]
    _fill(gathered, axis, mechanism)
    return gathered


def gather_equal(x: Tensor, axis: Axis, mechanism: str) -> list[Tensor]:
    """Return every rank's tensor, all of one shape, by a collective, whose memory is free when it is waited
    for (``pass_on``)."""
    gathered = x.new_empty(axis.size * x.numel())
    with WAIT_CLOCK:
        all_gather_single(gathered, x.view(-1), axis.group)
    count(mechanism, (axis.size - 1) * x.nbytes)
    return list(gathered.view(axis.size, *x.shape).unbind())


def _fill(gathered: list[Tensor], axis: Axis, mechanism: str):
    """Receive every rank's tensor but this one's own, which is sent."""
    x = gathered[axis.rank]
    operations = []
    for offset in range(1, axis.size):
        source = (axis.rank - offset) % axis.size
        if x.numel():
            operations.append(dist.P2POp(dist.isend, x, axis.neighbour(offset), axis.group))
            count(mechanism, x.nbytes)
        if gathered[source].numel():
            operations.append(dist.P2POp(dist.irecv, gathered[source], axis.ranks[source], axis.group))
    _finish(operations)


def gather(x: Tensor, lengths: list[int], axis: Axis, mechanism: str) -> Tensor:
    """Concatenate every rank's ``x``, ``lengths[i]`` long, on the first rank; the others keep their own."""
    if axis.size == 1:
        return x
    if not axis.is_first:
        count(mechanism, x.nbytes)
        send = dist.P2POp(dist.isend, x.contiguous(), axis.ranks[0], axis.group)
        _finish([send])
        return x
    whole = x.new_empty(sum(lengths), *x.shape[1:])
    own, *others = whole.split(lengths)
    waiting = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, other, source, axis.group) for other, source in zip(others, axis.ranks[1:])]
    )
    own.copy_(x)  # while the others' are under way
    with WAIT_CLOCK:
        for work in waiting:
            work.wait()
    return whole


def all_reduce(x: Tensor, axis: Axis, mechanism: str) -> Tensor:
    """Return the sum of every rank's ``x`` over ``axis``, the same on each; ``x`` may be overwritten."""
    return begin_all_reduce(x, axis, mechanism)()


def begin_all_reduce(x: Tensor, axis: Axis, mechanism: str) -> Callable[[], Tensor]:
    """Begin all_reduce; return what ends it and returns the sum, in the place of ``x`` if that is contiguous.
    Ends come in the order of beginnings."""
    if x.device.type == "cpu":
        return _begin_chunks(x, axis, mechanism)
    work = require_work(dist.all_reduce(x, group=axis.group, async_op=True))
    count(mechanism, 2 * (axis.size - 1) * x.nbytes // axis.size)

    def end() -> Tensor:
        with WAIT_CLOCK:
            work.wait()
        return x

    return end


def all_reduce_max(x: Tensor, axis: Axis, mechanism: str) -> Tensor:
    """Return the largest of every rank's ``x`` over ``axis``, by element, in its dtype; the same on each."""
    wide = x.float()  # of which every backend knows the maximum
    with WAIT_CLOCK:
        dist.all_reduce(wide, dist.ReduceOp.MAX, group=axis.group)
    count(mechanism, 2 * (axis.size - 1) * wide.nbytes // axis.size)
    return wide.to(x.dtype)


def _begin_chunks(x: Tensor, axis: Axis, mechanism: str) -> Callable[[], Tensor]:
    """Have every rank sum one chunk and hand it on: gloo's bytes, several times as fast."""
    flat = x.contiguous().view(-1)
    sizes = [len(chunk) for chunk in flat.tensor_split(axis.size)]
    own = sizes[axis.rank]
    chunks = begin_all_to_all(flat, sizes, [own] * axis.size, axis, mechanism)

    def end() -> Tensor:
        pieces = list(flat.split(sizes))
        torch.sum(chunks().view(axis.size, own), 0, out=pieces[axis.rank])
        _fill(pieces, axis, mechanism)
        return flat.view(x.shape)

    return end


def _finish(operations: list[dist.P2POp]):
    with WAIT_CLOCK:
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


def pass_on(x: Tensor, shape: tuple[int, ...], axis: Axis, mechanism: str) -> Callable[[], Tensor]:
    """Begin to send ``x`` to the next rank of a ring; return what receives from the one before, in ``shape``.

    An all-to-all with one neighbour each way: the same two messages of NCCL. Memory of a point-to-point
    message stays in use until the GPU has passed it, blocks behind the host; that of a collective until
    it is waited for (torch's ProcessGroupNCCL, TORCH_NCCL_AVOID_RECORD_STREAMS).
    """
    sent = [0] * axis.size
    sizes = [0] * axis.size
    sent[(axis.rank + 1) % axis.size] = x.numel()
    sizes[axis.rank - 1] = torch.Size(shape).numel()
    under_way = begin_all_to_all(x.reshape(-1), sent, sizes, axis, mechanism)
    return lambda: under_way().view(shape)


@dataclass
class Pipe:
    """A one-way stream of tensors, from the rank of ``incoming`` and to that of ``outgoing``.

    Receives may be posted ahead. Sends stay here until they are done: gloo loses one whose handle is dropped.
    keeps_buffers: what was taken may be overwritten from the next ``post`` or ``take`` on, so that two
    buffers of a shape serve all tensors, and addresses stay. free: those that hold nothing now; shapes: of
    what is to come.
    """

    incoming: dist.ProcessGroup | None
    outgoing: dist.ProcessGroup | None
    mechanism: str
    keeps_buffers: bool = False
    free: list[Tensor] = field(default_factory=list)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    taken: Tensor | None = None
    sending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    posted: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def send(self, x: Tensor, to: int):
        """Send ``x`` to global rank ``to`` without waiting for it."""
        x = x.contiguous()
        self.sending = [(work, tensor) for work, tensor in self.sending if not work.is_completed()]
        self.sending.append((require_work(dist.isend(x, to, group=self.outgoing)), x))
        count(self.mechanism, x.nbytes)

    def post(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: int):
        """Make ready for the next tensor from global rank ``source``."""
        self._release()
        fitting = [i for i, each in enumerate(self.free) if each.shape == shape and each.dtype == dtype]
        self.shapes.add(shape)
        buffer = self.free.pop(fitting[0]) if fitting else torch.empty(shape, dtype=dtype, device=device)
        self.posted.append((require_work(dist.irecv(buffer, source, group=self.incoming)), buffer))

    def take(self) -> Tensor:
        """Wait for the oldest tensor that was posted for, and return it."""
        work, buffer = self.posted.pop(0)
        with WAIT_CLOCK:
            work.wait()
        if self.keeps_buffers:
            self._release()
            self.taken = buffer
        return buffer

    def _release(self):
        if self.taken is not None and tuple(self.taken.shape) in self.shapes:
            self.free.append(self.taken)
        self.taken = None

    def forget_buffers(self):
        """Free the buffers of the shapes until now, which come no more."""
        self.free.clear()
        self.shapes.clear()
        self.taken = None

    def drain(self):
        """Receive all that was posted for, and wait until all that was sent has left."""
        while self.posted:
            self.take()
        with WAIT_CLOCK:
            for work, _ in self.sending:
                work.wait()
        self.sending.clear()
