"""Idle backends end where that is asked for."""

from types import SimpleNamespace

import pytest

from backend.client import connected, idle, pool
from backend.client.pool import Backend
from backend.config import ConfigError, ParallelConfig


class Process:
    """In the place of a launched backend's processes."""

    running = True
    closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def backend(monkeypatch):
    """A launched backend that the pool has at hand, and its clock."""
    client = SimpleNamespace(closed=False, close=lambda: None, is_open=lambda: True)
    found = Backend(ParallelConfig(), client, Process())
    found.now = found.last_used = 0.0
    for module in (pool, connected):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(pool, "_backends", {"topology": found})
    return found


def test_an_idle_backend_ends_and_is_no_loss(backend):
    backend.now = 599.0
    pool.close_idle(600)
    assert pool._backends and not backend.process.closed
    backend.now = 600.0
    pool.close_idle(600)
    assert not pool._backends and backend.process.closed and backend.loss() == ""


def test_a_request_counts_until_its_end(backend):
    backend.now = 1000.0
    with backend._busy:
        pool.close_idle(600)
    assert pool._backends
    backend._explained(lambda: None)
    pool.close_idle(600)
    assert pool._backends


def test_a_sampling_counts_between_its_requests(backend):
    """A preview's VAE, or another model that ComfyUI loads, may take minutes."""
    backend.now = 1000.0
    with backend.in_use():
        pool.close_idle(600)
    assert pool._backends
    pool.close_idle(600)
    assert not pool._backends


def test_a_backend_that_somebody_else_started_stays(backend):
    backend.process = None
    backend.now = 1e6
    pool.close_idle(600)
    assert pool._backends


def test_minutes_come_from_the_environment(monkeypatch):
    monkeypatch.delenv(idle.IDLE_VARIABLE, raising=False)
    assert idle.idle_seconds() is None
    monkeypatch.setenv(idle.IDLE_VARIABLE, "1.5")
    assert idle.idle_seconds() == 90


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_what_is_no_number_of_minutes_is_refused(monkeypatch, text):
    monkeypatch.setenv(idle.IDLE_VARIABLE, text)
    with pytest.raises(ConfigError, match="number of minutes"):
        idle.idle_seconds()


def test_the_watch_looks_again_and_again(monkeypatch):
    looks = []
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) > 3:
            raise SystemExit  # ends the thread

    monkeypatch.setattr(idle.time, "sleep", sleep)
    monkeypatch.setattr(
        idle.threading,
        "Thread",
        lambda target, **_: SimpleNamespace(start=lambda: pytest.raises(SystemExit, target)),
    )
    monkeypatch.setenv(idle.IDLE_VARIABLE, "0.3333333333333333")
    idle.watch(looks.append)
    idle.watch(looks.append)  # which watches already
    assert slept == [5.0] * 4 and looks == [20.0] * 3
