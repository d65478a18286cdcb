"""Cancel of a step that takes long: it returns, the ranks end the step, and the next run waits for that."""

import os
import signal
import threading

import pytest
from fake_backend import TOKEN, reply, sample_message
from live_backend import (  # noqa: F401  # fixtures
    CONFIG,
    backend,
    checkpoint,
    free_at_the_end,
    request_for,
)
from tiny import error_in_std, to_vae_units

from backend import protocol
from backend.client import client as client_module
from backend.client import pool, status
from backend.client.client import BackendClient
from backend.client.connected import WAITS
from backend.client.pool import Backend
from backend.config import ConfigError, ParallelConfig
from backend.protocol import Cancel, Cancelled, Progress, Release, Result, Sample, framing

FAKE = ParallelConfig(address="tcp:host:1")


class Interrupt(BaseException):
    """As ComfyUI's own, no Exception."""


def interrupt():
    raise Interrupt


def ignore(line: str):
    """Show nothing."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """The step under way counts as one that takes long."""
    monkeypatch.setattr(client_module, "LEAVE_SECONDS", 0.0)


class SlowRanks:
    """Handles a connection: the first Sample ends once its ``step`` is set, or with the connection where it
    ``dies``; later requests at once."""

    def __init__(self):
        self.step = threading.Event()
        self.received: list = []
        self.dies = False

    def __call__(self, connection):
        self.received += [framing.receive(connection), framing.receive(connection)]
        assert self.step.wait(120)
        if self.dies:
            return
        reply(connection, Progress(1, 9))  # as a rank that has not yet read the Cancel
        reply(connection, Cancelled(1))
        while True:
            self.received.append(framing.receive(connection))
            reply(connection, Result())


@pytest.fixture
def slow(serve, monkeypatch):
    """SlowRanks, and a Backend of theirs, which the pool has at hand."""
    ranks = SlowRanks()
    found = Backend(FAKE, BackendClient(serve(ranks), TOKEN))
    monkeypatch.setattr(pool, "_backends", {FAKE.topology(): found})
    yield ranks, found
    ranks.step.set()
    found.settled(lambda: None, ignore)
    found.close()


def cancel(found: Backend):
    assert found.sample(sample_message(), should_cancel=lambda: True, leaves=True) is None


def test_cancel_returns_while_the_step_goes_on(slow):
    """It waited for minutes where blocks compile. Nothing is sent until the step has ended. A run that waits
    for that can be cancelled at once, and the connection stays."""
    ranks, found = slow
    cancel(found)
    assert found.is_left and found.is_busy and found.alive() and found.left_line
    with pytest.raises(Interrupt):
        pool.backend_for(FAKE, interrupt)
    assert found.sample(sample_message(), should_cancel=lambda: True, leaves=True) is None
    assert found.is_left
    lines = []

    def show(line):
        lines.append(line)
        ranks.step.set()

    assert pool.backend_for(FAKE, show=show) is found and not found.is_busy
    assert lines[0].startswith(WAITS) and not found.left_line and not found.wait_line
    assert list(map(type, ranks.received)) == [Sample, Cancel]
    assert found.sample(sample_message()) == Result()


def test_an_interrupt_of_the_progress_callback_returns_too(serve):
    def handler(connection):
        framing.receive(connection)
        reply(connection, Progress(1, 9))
        assert framing.receive(connection) == Cancel()
        assert goes_on.wait(120)
        reply(connection, Cancelled(2))
        framing.receive(connection)
        reply(connection, Result())

    goes_on = threading.Event()
    found = Backend(FAKE, BackendClient(serve(handler), TOKEN))
    with pytest.raises(Interrupt):
        found.sample(sample_message(), lambda progress: interrupt(), leaves=True)
    assert found.is_left
    goes_on.set()
    assert found.settled(lambda: None, ignore)
    assert found.sample(sample_message()) == Result()


def test_who_does_not_leave_waits_for_the_end(slow):
    ranks, found = slow
    threading.Timer(0.3, ranks.step.set).start()
    assert found.sample(sample_message(), should_cancel=lambda: True) is None
    assert ranks.step.is_set() and not found.is_left and not found.left_line


def test_a_step_that_never_ends_is_found_though_nobody_waits(slow, monkeypatch, caplog):
    """Its ranks end as where Cancel waits, and the next run starts afresh."""
    _, found = slow
    monkeypatch.setattr(client_module, "CANCEL_SECONDS", 0.3)
    monkeypatch.setattr(client_module, "CANCEL_STEPS", 0)
    cancel(found)
    assert not found.closed
    assert not found.settled(lambda: None, ignore)
    assert found.closed and ["did not end in time" in each for each in caplog.messages] == [True]


def test_a_backend_that_ends_in_a_step_that_was_left_says_so_in_the_next_run(slow):
    ranks, found = slow
    ranks.dies = True
    cancel(found)
    ranks.step.set()
    assert not found.settled(lambda: None, ignore)
    warnings = []
    with pytest.raises(ConfigError):  # the address is not allowed
        pool.backend_for(FAKE, warn=warnings.append)
    assert len(warnings) == 1 and warnings[0].startswith("The backend at tcp:host:1 has hung up since")


def test_a_run_of_other_degrees_is_told_so_too(slow, monkeypatch):
    """Its ranks would have been those of the step that was left."""
    ranks, found = slow
    ranks.dies = True
    cancel(found)
    monkeypatch.setattr(Backend, "can_become", lambda self, config: True)
    monkeypatch.setattr(pool, "_launch", lambda *given: found)
    threading.Timer(0.3, ranks.step.set).start()
    warnings, lines = [], []
    pool.backend_for(ParallelConfig(pipefusion_degree=2), warn=warnings.append, show=lines.append)
    assert len(warnings) == 1 and "has hung up since" in warnings[0] and lines[0].startswith(WAITS)


def test_cancel_waits_where_no_thread_can_start(slow, monkeypatch):
    """The lock of the backend would be held for good."""
    ranks, found = slow

    def start(thread):
        ranks.step.set()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        cancel(found)
    assert not found.is_left and not found.is_busy
    assert found.sample(sample_message()) == Result()


def test_nobody_uses_ranks_that_end_what_was_cancelled(slow):
    """The idle watch may end them, as may whoever needs their memory to measure."""
    _, found = slow
    found.process, ours = object(), found.process
    cancel(found)
    assert found.is_idle(0.0) and not found.is_idle(60.0)
    with found.in_use():
        assert not found.is_idle(0.0)
    found.process = ours


def test_memory_goes_back_once_the_step_has_ended(slow):
    """Parallel Model gives it back at the end of its sampling, and does not wait for that."""
    ranks, found = slow

    class Room:
        shared_ranks = staticmethod(lambda welcome: [0])

    cancel(found)
    assert not found.release(Room(), interrupt, ["cached"]) and found.is_left
    ranks.step.set()
    while not isinstance(ranks.received[-1], Release):
        found.settled(lambda: None, ignore)
    assert ranks.received[2:] == [Release([0], ["cached"])]


def begun(found: Backend) -> tuple[int, int]:
    """The newest request of which rank 0 has begun a step, and that step."""
    times = found.process.heartbeats.step_times(0)
    return (times[-1].request, times[-1].step) if times else (-1, -1)


def test_ranks_drop_the_request_after_its_step_and_stay_warm(backend, checkpoint):
    """Rank 1 stands still in the request's beginning, as one that loads or compiles."""
    request, expected = request_for(backend, checkpoint)
    before = begun(backend)[0]
    pid = backend.welcome.pids[1]

    def is_running() -> bool:
        return status.report(backend).running == "Sample"

    os.kill(pid, signal.SIGSTOP)
    try:
        seen: list = []
        looks: list = []  # ten a second: rank 0 has checked the request by then, and waits for rank 1

        def should_cancel() -> bool:
            looks.append(is_running())
            return sum(looks) > 10

        assert backend.sample(request, seen.append, should_cancel, leaves=True) is None
        assert backend.is_left and is_running() and not seen
        with pytest.raises(Interrupt):
            pool.backend_for(CONFIG, interrupt)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert pool.backend_for(CONFIG) is backend and not backend.is_left
    number, step = begun(backend)
    assert number == before or step <= 1
    assert backend.client.request(protocol.Ping()).models == [request.model]
    assert error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4
