"""When the interrupt of a load reaches the caller."""

from types import SimpleNamespace

import pytest

from backend.client import interrupts, pool
from backend.client.auto.model_choice import ModelChoice
from backend.client.interrupts import InterruptWatch
from backend.client.pool import Backend
from backend.config import ParallelConfig
from backend.protocol import Arrange, Load, RefusedError, Unload

#: Clients whose request has begun, and waits for another client's.
ALONE = SimpleNamespace(waiting=None, late_reply=None)
WAITING = SimpleNamespace(waiting="another client's", late_reply=None)


class Interrupt(Exception):
    """What the caller interrupts by."""


class Caller:
    """Interrupts at each ``check`` once it is ``tired``."""

    def __init__(self):
        self.tired = False
        self.seen = []

    def check(self):
        if self.tired:
            raise Interrupt


@pytest.fixture
def caller():
    return Caller()


def test_a_load_of_weights_is_interrupted_at_once(caller):
    watch = InterruptWatch(ALONE, caller.check, caller.seen.append, is_short=False)
    watch.check()
    caller.tired = True
    with pytest.raises(Interrupt):
        watch.check()


def test_a_short_request_is_interrupted_at_its_end(caller):
    """Its reply would end the connection, and the ranks."""
    watch = InterruptWatch(ALONE, caller.check, caller.seen.append, is_short=True)
    watch.end()
    caller.tired = True
    watch.check()
    caller.tired = False
    watch.check()
    with pytest.raises(Interrupt):
        watch.end()


def test_an_interrupt_does_not_wait_for_ever(caller, monkeypatch):
    """Ranks that hang, or work for another client, do not reply."""
    now = [0.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    watch = InterruptWatch(ALONE, caller.check, caller.seen.append, is_short=True)
    caller.tired = True
    watch.check()
    now[0] = interrupts.PATIENCE
    watch.check()
    now[0] += 1.0
    with pytest.raises(Interrupt):
        watch.check()


def test_a_cancelled_load_that_is_refused_is_not_tried_again():
    """Nor does anything leave for it."""

    class Refusing:
        welcome = SimpleNamespace(devices=[])
        closed = False
        waiting = None
        late_reply = None

        def request(self, message, check, on_progress):
            check()
            raise RefusedError("rank 0 lacks memory")

    def check():
        raise Interrupt

    backend = Backend(ParallelConfig(address="tcp:host:1"), Refusing())
    with pytest.raises(RefusedError):
        backend.load("/a", check=lambda: None)
    backend.models["/a", "default", "auto"] = "/a"
    with pytest.raises(Interrupt):
        backend.load("/a", check=check)


def test_a_change_of_methods_is_whole_before_an_interrupt(caller, monkeypatch):
    """Else ranks would run with other degrees than they are known by."""
    asked = []

    class Changing:
        welcome = SimpleNamespace(device="cpu")
        closed = False
        waiting = None
        late_reply = None

        def request(self, message, check, on_progress):
            check()
            asked.append(type(message).__name__)
            return SimpleNamespace(models=["/a"], device="cpu")

    before, after = ParallelConfig(cfg_degree=2, device="cpu"), ParallelConfig(ulysses_degree=2, device="cpu")
    process = SimpleNamespace(models=frozenset(), running=True, close=lambda: None)
    backend = Backend(before, Changing(), process)
    backend.models = {ModelChoice("/a"): "/a", ModelChoice("/b"): "/b"}
    monkeypatch.setattr(backend, "alive", lambda: True)
    monkeypatch.setattr(pool, "_folders", set())
    monkeypatch.setattr(pool, "_backends", {before.topology(): backend})
    caller.tired = True
    with pytest.raises(Interrupt):
        pool.backend_for(after, caller.check)
    assert asked == ["Arrange", "Ping"] and [*backend.models.values()] == ["/a"]
    assert pool.backend_for(after) is backend and pool._backends == {after.topology(): backend}


@pytest.mark.parametrize("message", [Load("/a"), Unload("/a")], ids=["Load", "Unload"])
def test_a_short_request_that_waits_for_another_client_is_interrupted_at_once(caller, message):
    """No rank has begun it. One that nobody can take out of the queue goes on."""
    waits = InterruptWatch(WAITING, caller.check, caller.seen.append, is_short=True)
    caller.tired = True

    def request(message, check, on_progress):
        check()

    with pytest.raises(Interrupt):
        waits.ask(request, message)
    stays = InterruptWatch(WAITING, caller.check, caller.seen.append, is_short=True)
    stays.ask(request, Arrange({}))


def test_one_that_loads_weights_all_the_same_is_not_short(caller):
    """As where the file of a loaded model has changed."""
    watch = InterruptWatch(ALONE, caller.check, caller.seen.append, is_short=True)
    watch.on_progress("read")
    assert caller.seen == ["read"]
    caller.tired = True
    with pytest.raises(Interrupt):
        watch.check()
    again = InterruptWatch(ALONE, caller.check, caller.seen.append, is_short=True)
    again.check()
    with pytest.raises(Interrupt):
        again.on_progress("read")
