"""What a sampler's node says of a slow first step, also after Cancel, on stand-ins for ComfyUI."""

from types import SimpleNamespace
from typing import Any

import pytest
from handles_in_numbers import handles

from backend.client.client import Left
from backend.client.connected import LEFT, STOP, STOP_BOTH, WAITS, Connected
from backend.config import ParallelConfig

REASON = "the ranks compile"


@pytest.fixture
def host():
    """Modules of nodes/host on stand-ins (handles_in_numbers.py)."""
    with handles() as found:
        yield found


@pytest.fixture
def backend() -> Any:
    """Of ranks of ours, which have begun."""
    timer = SimpleNamespace(reason=REASON, spent=1.0)
    client: Any = SimpleNamespace(waiting=None, timer=timer, left=None)
    process: Any = "ours"
    return Connected(ParallelConfig(), client, process)


def test_a_node_says_what_a_slow_first_step_does(host, backend):
    """Once it takes a while. Steps keep their own line."""
    status = host.progress.NodeStatus()
    shown = []
    status.send = shown.append
    timer = backend.client.timer
    assert not status.interrupted(backend=backend) and shown == []
    timer.spent = 10.0
    assert not status.interrupted(backend=backend) and shown == [REASON]
    timer.reason = ""
    status.show("step 1/2")  # as its Progress comes
    assert not status.interrupted(backend=backend)
    timer.reason, timer.spent = REASON, 0.5  # PipeFusion's first patches
    assert not status.interrupted(backend=backend) and shown[1:] == ["step 1/2"]


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_node_says_what_goes_on_after_cancel(host, backend, is_ours):
    """And how it is ended, where its ranks are ours; so does the next run, which waits for it."""
    shown = []
    backend.process = backend.process if is_ours else None
    with pytest.raises(host.management.InterruptProcessingException), host.progress.NodeStatus() as status:
        status.send = shown.append
        host.management.processing_interrupted = lambda: True
        assert status.interrupted(backend=backend) and shown == [host.progress.CANCELLING]
        backend.client.left = Left(REASON, since=0.0, deadline=1.0)
        raise host.progress.interrupt()
    assert shown[1:] == ["; ".join([LEFT, REASON, *[STOP] * is_ours])]
    waits, seconds = backend.wait_line.split(", ", 1)
    assert waits == WAITS and seconds.endswith("; ".join([" s", REASON, *[STOP_BOTH] * is_ours]))


def test_nothing_is_said_to_go_on_where_the_step_has_ended(host, backend):
    shown = []
    with pytest.raises(host.management.InterruptProcessingException), host.progress.NodeStatus() as status:
        status.send = shown.append
        host.management.processing_interrupted = lambda: True
        status.interrupted(backend=backend)
        raise host.progress.interrupt()
    assert shown == [host.progress.CANCELLING, "cancelled"]
