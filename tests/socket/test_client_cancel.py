"""Cancel as the client asks for it: at a step, between two, and of ranks that hang."""

import select
import sys
import threading
import time
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch
from fake_backend import TOKEN, reply, sample_message

from backend.client import client as client_module
from backend.client import connected
from backend.client.client import BackendClient
from backend.client.connected import Connected
from backend.client.step_timer import COMPILES
from backend.config import ParallelConfig
from backend.protocol import (
    Cancel,
    Cancelled,
    Load,
    ModelCall,
    Ping,
    Pong,
    Progress,
    Result,
    Sample,
    framing,
)


def cancellable(received: list):
    """A server that steps for ever, until Cancel comes; then it answers a Ping."""

    def handler(connection):
        framing.receive(connection)
        step = 0
        while not select.select([connection], [], [], 0.02)[0]:
            step += 1
            reply(connection, Progress(step, 1000))
        received.append(framing.receive(connection))
        reply(connection, Progress(step + 1, 1000))  # the step that was running when Cancel came
        reply(connection, Cancelled(step + 1))
        received.append(framing.receive(connection))
        reply(connection, Pong())

    return handler


def test_cancel(serve):
    received, seen = [], []
    client = BackendClient(serve(cancellable(received)), TOKEN)
    assert client.sample(sample_message(), seen.append, lambda: len(seen) >= 3) is None
    assert client.request(Ping()) == Pong()
    assert received == [Cancel(), Ping()] and len(seen) == 3


def test_interrupt_raised_by_the_progress_callback(serve):
    class Interrupt(BaseException):
        """As ComfyUI's own, no Exception."""

    def interrupt(progress):
        raise Interrupt

    received = []
    client = BackendClient(serve(cancellable(received)), TOKEN)
    with pytest.raises(Interrupt):
        client.sample(sample_message(), interrupt)
    assert client.request(Ping()) == Pong()
    assert received == [Cancel(), Ping()]


def test_cancel_while_nothing_arrives(serve):
    def handler(connection):
        framing.receive(connection)
        assert framing.receive(connection) == Cancel()
        reply(connection, Cancelled(0))

    client = BackendClient(serve(handler), TOKEN)
    asked = []
    began = time.monotonic()
    assert client.sample(sample_message(), should_cancel=lambda: asked.append(1) or len(asked) > 3) is None
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("hangs_up", [False, True], ids=["never answers", "hangs up at Cancel"])
def test_an_exit_waits_for_no_step(serve, hangs_up):
    """SIGTERM of the doctor: it waited up to 120 s, and was killed before its files were removed; ranks that
    SIGTERM had ended, too, made a finding of it instead, and the doctor went on."""
    release = threading.Event()

    def handler(connection):
        framing.receive(connection)
        if hangs_up:
            framing.receive(connection)
        else:
            release.wait(120)

    client = BackendClient(serve(handler), TOKEN)
    with pytest.raises(SystemExit):
        client.sample(sample_message(), should_cancel=lambda: sys.exit(143))
    assert client.closed and not release.is_set()
    release.set()


def test_result_that_crosses_cancel(serve):
    def handler(connection):
        framing.receive(connection)
        reply(connection, Result({}, {"samples": torch.zeros(1)}))
        assert framing.receive(connection) == Cancel()
        assert framing.receive(connection) == Ping()
        reply(connection, Pong())

    client = BackendClient(serve(handler), TOKEN)
    assert client.sample(sample_message(), should_cancel=lambda: True) is None
    assert client.request(Ping()) == Pong()


def test_a_step_that_does_not_end_is_left_and_is_no_error(serve, monkeypatch):
    monkeypatch.setattr(client_module, "CANCEL_SECONDS", 0.3)
    release = threading.Event()
    client = BackendClient(serve(lambda connection: release.wait(120)), TOKEN)
    assert client.sample(sample_message(), should_cancel=lambda: True) is None
    release.set()
    assert client.closed


def test_cancel_waits_for_a_step_as_long_as_those_before(serve, monkeypatch):
    """Of a request whose steps take longer than CANCEL_SECONDS; the connection stays usable."""
    monkeypatch.setattr(client_module, "CANCEL_SECONDS", 0.05)

    def handler(connection):
        framing.receive(connection)
        time.sleep(0.6)
        reply(connection, Progress(1, 9))
        assert framing.receive(connection) == Cancel()
        time.sleep(0.6)
        reply(connection, Cancelled(2))
        assert framing.receive(connection) == Ping()
        reply(connection, Pong())

    client, seen = BackendClient(serve(handler), TOKEN), []
    assert client.sample(sample_message(), seen.append, lambda: bool(seen)) is None
    assert client.request(Ping()) == Pong()


@pytest.mark.parametrize("kind", [Sample, ModelCall])
def test_cancel_of_a_first_step_waits_for_one_as_long_as_those_of_earlier_requests(serve, monkeypatch, kind):
    """Of the same model, with whatever LoRAs: ranks that were in the first step of a slow video ended."""
    monkeypatch.setattr(client_module, "CANCEL_SECONDS", 0.05)

    def handler(connection):
        framing.receive(connection)
        time.sleep(0.6)
        if kind is Sample:
            reply(connection, Progress(1, 1))
        reply(connection, Result())
        framing.receive(connection)
        assert framing.receive(connection) == Cancel()
        time.sleep(0.6)
        reply(connection, Cancelled(1))
        assert framing.receive(connection) == Ping()
        reply(connection, Pong())

    client = BackendClient(serve(handler), TOKEN)
    first, second = (
        Sample(model, "euler", 1.0, 0) if kind is Sample else ModelCall(model) for model in ("m", "m+lora")
    )
    assert client.sample(first) == Result()
    assert client.sample(second, should_cancel=lambda: True) is None
    assert client.request(Ping()) == Pong()


def test_cancel_in_the_first_step_of_all_waits_as_long_as_it_has_taken(serve, monkeypatch):
    """No step of the model has ended: ranks of a slow video ended, and the model was loaded again."""
    monkeypatch.setattr(client_module, "CANCEL_SECONDS", 0.05)
    begun = time.monotonic()

    def handler(connection):
        framing.receive(connection)
        assert framing.receive(connection) == Cancel()
        time.sleep(0.6)
        reply(connection, Cancelled(1))
        assert framing.receive(connection) == Ping()
        reply(connection, Pong())

    client = BackendClient(serve(handler), TOKEN)
    assert client.sample(sample_message(), should_cancel=lambda: time.monotonic() > begun + 0.6) is None
    assert client.request(Ping()) == Pong()


@pytest.mark.parametrize("compile, ends", [("blocks", True), ("auto", False)])
def test_cancel_waits_for_a_step_that_compiles(serve, monkeypatch, compile, ends):
    """For 20 minutes in the first step, by a clock that stands at 1100 s once Cancel is sent."""
    clock = chain([0.0], repeat(1100.0))
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=clock.__next__))
    left = threading.Event()

    def handler(connection):
        framing.receive(connection)
        assert framing.receive(connection) == Cancel()
        left.wait(0.3)
        reply(connection, Cancelled(0))
        left.wait(10)

    client = BackendClient(serve(handler), TOKEN)
    message = replace(sample_message(), compile=compile)
    assert client.sample(message, should_cancel=lambda: True) is None
    left.set()
    assert client.closed != ends
    client.close()


def test_cancel_does_not_wait_for_ranks_that_hang(serve):
    release = threading.Event()
    asked = []
    began = time.monotonic()
    client = BackendClient(
        serve(lambda connection: release.wait(120)), TOKEN, is_hung=lambda: asked.append(1) or len(asked) > 3
    )
    assert client.sample(sample_message(), should_cancel=lambda: True) is None
    assert time.monotonic() - began < 60 and client.closed
    release.set()


def test_hung_ranks_that_are_ended_during_cancel_are_no_error(serve):
    hung = []

    def handler(connection):
        framing.receive(connection)
        assert framing.receive(connection) == Cancel()
        hung.append(True)  # and the connection ends

    client = BackendClient(serve(handler), TOKEN, is_hung=lambda: bool(hung))
    assert client.sample(sample_message(), should_cancel=lambda: True) is None


def test_check_that_raises_closes(serve):
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    release = threading.Event()
    client = BackendClient(serve(lambda connection: release.wait(120)), TOKEN)
    with pytest.raises(Stop):
        client.request(Load("/m"), stop)
    release.set()
    assert client.closed  # its reply could come later, in place of another's


def test_what_a_slow_first_step_waits_for_is_known_while_it_runs(serve, monkeypatch):
    """The node says so once it takes a while; nothing of it is left for the next request."""
    monkeypatch.setattr(connected, "SLOW_SECONDS", 0.0)
    go_on = threading.Event()

    def handler(connection):
        framing.receive(connection)
        assert go_on.wait(60)  # as a rank that compiles
        for step in (1, 2, 3):
            reply(connection, Progress(step, 3))
        assert framing.receive(connection) == Cancel()
        reply(connection, Cancelled(3))

    client = BackendClient(serve(handler), TOKEN)
    backend = Connected(ParallelConfig(), client)
    lines: list[str] = []

    def should_cancel() -> bool:
        lines.append(backend.step_line)
        if len(lines) == 2:
            go_on.set()
        return len(lines) == 5

    message = replace(sample_message(), compile="blocks", warmup_steps=1)
    assert backend.step_line == ""
    assert client.sample(message, should_cancel=should_cancel) is None
    assert lines[:2] == [COMPILES, COMPILES] and lines[-1] == ""
    assert client.timer is None and backend.step_line == ""
