"""What a sampler's node says while a slow first step runs, on stand-ins for ComfyUI."""

from functools import partial
from types import SimpleNamespace

import pytest
from handles_in_numbers import handles

from backend.client.connected import Connected


@pytest.fixture
def host():
    """Modules of nodes/host on stand-ins (handles_in_numbers.py)."""
    with handles() as found:
        yield found


def test_a_node_says_what_a_slow_first_step_waits_for(host):
    """Once it takes a while; at once when Cancel is pressed, with what ends it. Steps keep their own line."""
    status = host.progress.NodeStatus()
    shown = []
    status.send = shown.append
    timer = SimpleNamespace(reason="the ranks compile", spent=1.0)
    client = SimpleNamespace(waiting=None, timer=timer)
    step_line = partial(Connected.step_line, SimpleNamespace(client=client))
    backend = SimpleNamespace(wait_line="", step_line=step_line, client=client, process="ours")
    assert not status.interrupted(backend=backend) and shown == []
    timer.spent = 10.0
    assert not status.interrupted(backend=backend) and shown == ["the ranks compile"]
    timer.reason = ""
    status.show("step 1/2")  # as its Progress comes
    assert not status.interrupted(backend=backend)
    timer.reason, timer.spent = "the ranks compile", 0.5  # PipeFusion's first patches
    assert not status.interrupted(backend=backend) and shown[1:] == ["step 1/2"]
    host.management.processing_interrupted = lambda: True
    assert status.interrupted(backend=backend)
    client.timer = None
    assert status.interrupted(backend=backend)
    cancelling = f"cancelling: the ranks compile; {host.progress.STOP}"
    assert shown[2:] == [cancelling, host.progress.CANCELLING]


@pytest.mark.parametrize("waiting, said", [(None, "cancelling: the ranks load"), ("in a queue", "")])
def test_stop_ranks_is_said_of_ranks_of_ours_that_run_alone(host, waiting, said):
    """Others are only hung up on; a request in a queue leaves it at once."""
    client = SimpleNamespace(waiting=waiting)
    backend = SimpleNamespace(step_line=lambda after: "the ranks load", client=client, process=None)
    assert host.progress.cancelling(backend) == (said or host.progress.CANCELLING)
