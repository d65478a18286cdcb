"""What every rank of a mesh sends and receives, written down one rank after the other on meta tensors, and
what strict communicators make of it: no real network pairs so strictly as NCCL.
"""

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)
from meta_shapes import Mode, operator
from operation_count import Count, given_to, tensors_in

from backend.parallel.mesh import ALL_GATHER

#: What names of products contain, whose kernels are chosen by shape.
PRODUCTS = ("mm", "linear", "attention")


@dataclass(frozen=True)
class Message:
    """Part of an operation: to ("send") or from ("receive") a global rank, or with a whole group ("all")."""

    direction: str
    peer: int | None
    what: tuple


@dataclass
class Operation:
    """What one call gives a communicator: it is done once every message has met its counterpart.

    group: a name that ends in the ranks. started, waited: device operations before the call and before its
    wait; None without a wait.
    """

    group: str
    messages: list[Message]
    received: list[Tensor]
    started: int
    waited: int | None = None

    @cached_property
    def storages(self) -> set[int]:
        """Where what is received lies."""
        return {x.untyped_storage()._cdata for x in self.received}


@dataclass
class Log:
    """One rank's program: ("start" | "wait" | "launch", operation) in order. A launch is a kernel's first, at
    which CUDA may wait for all that the rank has started.

    launched: kernels so far. names: of what it computes. early_waits: (group, operation that was
    next) of waits after which something else was computed first than with what had come. unused: those of
    them after which nothing has been yet. host_waits: what the host waited for in a step in steady state,
    None where no such step was recorded.
    """

    rank: int
    events: list[tuple[str, Operation]] = field(default_factory=list)
    launched: set[tuple] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    early_waits: list[tuple[str, str]] = field(default_factory=list)
    fresh: list[Operation] = field(default_factory=list)
    unused: list[tuple[Operation, str]] = field(default_factory=list)
    host_waits: list[str] | None = None

    def meanwhile(self, operation: Operation) -> list[str]:
        """The names of what was computed between an operation's start and its wait."""
        return self.names[operation.started : operation.waited]

    @property
    def operations(self) -> list[Operation]:
        return [operation for kind, operation in self.events if kind == "start"]


class RecordedWork:
    """A communication under way."""

    def __init__(self, log: Log, operation: Operation):
        self.log = log
        self.operation = operation

    def wait(self):
        """Note the first wait."""
        if self.operation.waited is None:
            self.operation.waited = len(self.log.names)
            self.log.events.append(("wait", self.operation))
            if any(x.numel() for x in self.operation.received):
                self.log.fresh.append(self.operation)
        return True

    def is_completed(self):
        return False  # so that nobody relies on it


class OperationWatch(Mode):
    """Counts a rank's operations, and looks whether what was waited for is used at once. ``count`` is shown
    them while it is active."""

    def __init__(self, log: Log, count: Count):
        super().__init__()
        self.log = log
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, is_view, *_ = operator(func)
        if (self.log.fresh or self.log.unused) and name not in ("aten::empty", "aten::new_empty"):
            self.look(name, given_to(args, kwargs), is_view)
        self.launch(name, args, is_view)
        self.log.names.append(name)
        return self.count.watched(func, args, kwargs)

    def launch(self, name: str, args: tuple, is_view: bool):
        """Note a kernel's first launch; products have one for each shape, by which libraries choose."""
        is_product = _is_product(name)
        if is_view and not is_product:
            return
        given = tensors_in(args)
        shapes = [x.shape for x in given] if is_product else ()
        kernel = (name, *[(x.dtype, x.is_contiguous()) for x in given], *shapes)
        if kernel not in self.log.launched:
            self.log.launched.add(kernel)
            self.log.events.append(("launch", Operation(name, [], [], len(self.log.names))))

    def look(self, name: str, given: list[Tensor], is_view: bool):
        """Is the first operation after a wait one with what has come? Views of others compute nothing."""
        used = {x.untyped_storage()._cdata for x in given}
        waited, self.log.unused = self.log.unused, []
        for operation, after in waited:
            if used & operation.storages:
                self.log.early_waits.append((operation.group, after))
            else:
                self.log.unused.append((operation, after))
        if all(used.isdisjoint(operation.storages) for operation in self.log.fresh):
            if is_view:
                return
            self.log.unused += [(operation, name) for operation in self.log.fresh]
        self.log.fresh.clear()


@cache
def _is_product(name: str) -> bool:
    return any(word in name for word in PRODUCTS)


def _about(x: Tensor, count: int | None = None) -> tuple:
    return str(x.dtype).removeprefix("torch."), x.numel() if count is None else count


class _Peers:
    """Stand-ins for torch.distributed's functions that write down one rank's calls."""

    def __init__(self, log: Log):
        self.log = log

    def start(self, group, messages: list[Message], received: list[Tensor]) -> RecordedWork:
        assert group is not None, "a communication without a group"
        operation = Operation(str(group), messages, received, len(self.log.names))
        self.log.events.append(("start", operation))
        return RecordedWork(self.log, operation)

    def isend(self, x: Tensor, to: int, group=None) -> RecordedWork:
        assert x.is_contiguous()
        return self.start(group, [Message("send", to, _about(x))], [])

    def irecv(self, x: Tensor, source: int, group=None) -> RecordedWork:
        assert x.is_contiguous()
        return self.start(group, [Message("receive", source, _about(x))], [x])

    def batch(self, operations: list) -> list[RecordedWork]:
        """One operation, as NCCL's group calls make it."""
        messages, received = [], []
        for direction, x, peer, _ in operations:
            messages.append(Message(direction, peer, _about(x)))
            if direction == "receive":
                received.append(x)
        return [self.start(operations[0][3], messages, received)]

    def p2p(self, operation: Callable, x: Tensor, peer: int, group=None) -> tuple:
        assert x.is_contiguous()
        return ("send" if operation == self.isend else "receive", x, peer, group)

    def all_to_all(self, received, sent, sizes, counts, group=None, async_op=False):
        assert sum(counts) == sent.numel() and sum(sizes) == received.numel()
        messages = []
        for rank, count, size in zip(ranks_of(group), counts, sizes, strict=True):
            messages.append(Message("send", rank, _about(sent, count)))
            messages.append(Message("receive", rank, _about(received, size)))
        return self._collective(group, messages, received, async_op)

    def broadcast(self, x, source, group=None, async_op=False):
        # meta_device.py has no tensor in the place of torch.unique's names
        about = _about(x) if isinstance(x, Tensor) else ("int64", x.count)
        return self._collective(group, [Message("all", None, ("broadcast", source, *about))], x, async_op)

    def all_gather(self, gathered, x, group=None, async_op=False):
        assert x.is_contiguous() and gathered.numel() == len(ranks_of(group)) * x.numel()
        about = [Message("all", None, ("all_gather", *_about(x)))]
        return self._collective(group, about, gathered, async_op)

    def all_reduce(self, x, operation=dist.ReduceOp.SUM, group=None, async_op=False):
        about = ("all_reduce", str(operation), *_about(x))
        return self._collective(group, [Message("all", None, about)], x, async_op)

    def _collective(self, group, messages, received, async_op):
        work = self.start(group, messages, [received] if isinstance(received, Tensor) else [])
        return work if async_op else work.wait()


def ranks_of(group: str) -> list[int]:
    """Return the global ranks of a group's name."""
    return [int(rank) for rank in group.rpartition(":")[2].split(",")]


@contextmanager
def recorded(log: Log, operations: bool = True, count: Count | None = None) -> Iterator[None]:
    """Write down what one rank sends, receives and waits for, and the ``operations`` in between, which
    ``count`` sees too."""
    peers = _Peers(log)
    stand_ins = {
        "isend": peers.isend,
        "irecv": peers.irecv,
        "P2POp": peers.p2p,
        "batch_isend_irecv": peers.batch,
        "all_to_all_single": peers.all_to_all,
        "broadcast": peers.broadcast,
        "all_reduce": peers.all_reduce,
        ALL_GATHER: peers.all_gather,
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(patch.object(dist, name, stand_in))
        if operations:
            stack.enter_context(OperationWatch(log, count or Count()))
        yield


def differences(logs: list[Log]) -> list[str]:
    """Say which messages have no counterpart of the same type and size in the same place."""
    sent, received, shared = defaultdict(list), defaultdict(list), defaultdict(dict)
    for log in logs:
        for operation in log.operations:
            for message in operation.messages:
                if message.direction == "send":
                    sent[operation.group, log.rank, message.peer].append(message.what)
                elif message.direction == "receive":
                    received[operation.group, message.peer, log.rank].append(message.what)
                else:
                    shared[operation.group].setdefault(log.rank, []).append(message.what)
    lines = []
    for key in sorted({*sent, *received}):
        group, source, to = key
        if sent[key] != received[key]:
            pairs = zip(sent[key], received[key])
            at = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(sent[key]), len(received[key]))
            )
            lines.append(
                f"{group}: {source} sends {to} {sent[key][at : at + 1]} as number {at}, which expects "
                f"{received[key][at : at + 1]}"
            )
    for group, programs in shared.items():
        first = programs.get(ranks_of(group)[0])
        lines += [
            f"{group}: rank {rank} does not take part as the first one does"
            for rank in ranks_of(group)
            if programs.get(rank) != first
        ]
    return lines


def deadlock(logs: list[Log]) -> str | None:
    """Run all programs as NCCL would at its strictest; say where they stop, None where all end.

    A communicator begins an operation when the one before it is done, and ends it when all of its messages
    have met, at the head of their communicators too. A wait holds back all that its rank starts afterwards,
    since streams wait for the computing one. A kernel's first launch holds a rank until all that it has
    started is done.
    """
    programs = {log.rank: deque(log.events) for log in logs}
    started: dict[int, set[int]] = {log.rank: set() for log in logs}
    queues: dict[tuple[str, int], deque[Operation]] = defaultdict(deque)
    done: set[int] = set()
    moved = True
    while moved:
        moved = False
        for rank, program in programs.items():
            while program and _goes_on(*program[0], started[rank], done):
                kind, operation = program.popleft()
                moved = True
                if kind == "start":
                    started[rank].add(id(operation))
                    queues[operation.group, rank].append(operation)
        for group, rank in list(queues):
            members = _meeting(group, rank, queues)
            for member in members:
                done.add(id(queues[group, member].popleft()))
            moved = moved or bool(members)
    stuck = {rank: program[0][1].group for rank, program in programs.items() if program}
    queued = {key: len(queue) for key, queue in queues.items() if queue}
    return f"ranks wait for {stuck}, communicators hold {queued}" if stuck or queued else None


def _goes_on(kind: str, operation: Operation, started: set[int], done: set[int]) -> bool:
    """Whether a rank's program passes an event."""
    return started <= done if kind == "launch" else kind == "start" or id(operation) in done


def _meeting(group: str, rank: int, queues) -> set[int]:
    """The ranks whose operations at the head of a communicator end together with this one; none where one of
    them has not come that far."""
    members: set[int] = set()
    reached = {rank}
    while reached - members:
        member = (reached - members).pop()
        if not queues[group, member]:
            return set()
        members.add(member)
        for message in queues[group, member][0].messages:
            reached |= set(ranks_of(group)) if message.peer is None else {message.peer}
    heads = {member: queues[group, member][0].messages for member in members}
    sent = [(m, x.peer, x.what) for m in members for x in heads[m] if x.direction == "send"]
    wanted = [(x.peer, m, x.what) for m in members for x in heads[m] if x.direction == "receive"]
    return members if sorted(sent) == sorted(wanted) else set()
