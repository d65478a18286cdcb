"""backend/parallel/comm.py in one process: in which order it posts, copies and waits."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backend.parallel import comm
from backend.parallel.mesh import Axis

GROUP = object()  # stands for a process group: nothing is sent
AXIS = Axis(GROUP, 0, 2, (0, 1))  # pyright: ignore[reportArgumentType]  # nothing is sent


class Clock:
    """In the place of WAIT_CLOCK: writes down in ``events`` when a wait begins and ends."""

    def __init__(self, events: list[str]):
        self.events = events

    def __enter__(self):
        self.events.append("waits")

    def __exit__(self, *error):
        self.events.append("has waited")


def test_the_first_rank_copies_its_own_while_others_tensors_come(monkeypatch):
    """Only the wait counts as one: WAIT_CLOCK neither has the posting of receives nor the copy."""
    events = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                events.append("copied")
            return func(*args, **kwargs or {})

    def post(operations):
        events.append("posted")
        return [SimpleNamespace(wait=lambda: events.append("came")) for _ in operations]

    monkeypatch.setattr(comm, "WAIT_CLOCK", Clock(events))
    monkeypatch.setattr(comm.dist, "P2POp", lambda *given: given)
    monkeypatch.setattr(comm.dist, "batch_isend_irecv", post)
    own = torch.ones(2, 3)
    with Copies():
        whole = comm.gather(own, [2, 4], AXIS, "outputs")
    assert events == ["posted", "copied", "waits", "came", "has waited"]
    assert whole.shape == (6, 3) and torch.equal(whole[:2], own)


def test_an_all_to_all_is_waited_for_once(monkeypatch):
    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(comm.dist, "all_to_all_single", lambda *_, **__: work)
    end = comm.begin_all_to_all(torch.zeros(4), [2, 2], [2, 2], AXIS, "ulysses")
    assert end().shape == (4,)
    with pytest.raises(AssertionError, match="waited for once"):
        end()


def test_the_end_of_what_a_pipe_has_sent_counts_as_a_wait(monkeypatch):
    """As what comes does: a slow stage after this one keeps it."""
    events = []
    monkeypatch.setattr(comm, "WAIT_CLOCK", Clock(events))
    pipe = comm.Pipe(None, None, "pipeline")
    for name in ("came", "left"):
        work = SimpleNamespace(wait=partial(events.append, name))
        (pipe.posted if name == "came" else pipe.sending).append((work, torch.ones(1)))
    pipe.drain()
    assert events == ["waits", "came", "has waited", "waits", "left", "has waited"]
    assert not pipe.posted and not pipe.sending
