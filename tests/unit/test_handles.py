"""Handles of models on stand-ins for ComfyUI: which models stay on the ranks, and when room is made."""

from types import SimpleNamespace

import pytest
from handles_in_numbers import handles


@pytest.fixture
def host():
    """Modules of nodes/host on stand-ins (handles_in_numbers.py)."""
    with handles() as found:
        yield found


def test_room_for_other_ranks_is_made_once_those_that_end_have_ended(host, monkeypatch):
    """A change of GPUs: ComfyUI's models left for what the ranks that were about to end still had."""
    done = []
    config = host.handle.ParallelConfig(cfg_degree=2, gpus="1,2", device="cuda")
    before = host.handle.ParallelConfig(cfg_degree=2, gpus="0,1", device="cuda")
    process = SimpleNamespace(running=True, models=frozenset(), close=lambda: done.append("end"))
    client = SimpleNamespace(closed=False, is_open=lambda: True, close=lambda: None)
    host.pool._backends[before.topology()] = host.pool.Backend(before, client, process)

    def start(*_):
        done.append("start")
        raise KeyboardInterrupt

    room = SimpleNamespace(make_for_start=lambda gpus: done.append(gpus))
    monkeypatch.setattr(host.handle, "host_room", lambda: room)
    monkeypatch.setattr(host.handle, "check_headers", lambda *_: None)
    monkeypatch.setattr(host.handle.ParallelConfig, "resolve_device", lambda self, gpus: "cuda")
    monkeypatch.setattr(host.pool, "_folders", set())
    monkeypatch.setattr(host.pool, "BackendProcess", start)
    with pytest.raises(KeyboardInterrupt):
        host.handle.load(config, "/a", "default")
    assert done == ["end", [1, 2], "start"]


def test_a_node_says_that_it_waits_for_another_client(host):
    """Also once Cancel is pressed, and no longer once its request has begun."""
    status = host.progress.NodeStatus()
    shown = []
    status.send = shown.append
    backend = SimpleNamespace(wait_line="waiting for another client's request, 2 steps left")
    assert not status.interrupted(backend=backend) and not status.interrupted(backend=backend)
    backend.wait_line = ""
    status.interrupted(backend=backend)
    status.show("step 1/2")
    assert not status.interrupted(backend=backend)
    backend.wait_line = "waiting for another client's request"
    host.management.processing_interrupted = lambda: True
    assert status.interrupted(backend=backend)
    first = "waiting for another client's request, 2 steps left"
    assert shown == [first, "", "step 1/2", backend.wait_line, host.progress.CANCELLING]
