"""When the interrupt of a load reaches the caller."""

import pytest

from backend.client.interrupts import Watch


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
    watch = Watch(caller.check, caller.seen.append, is_short=False)
    watch.check()
    caller.tired = True
    with pytest.raises(Interrupt):
        watch.check()


def test_a_short_request_is_interrupted_at_its_end(caller):
    """Its reply would end the connection, and the ranks."""
    watch = Watch(caller.check, caller.seen.append, is_short=True)
    watch.end()
    caller.tired = True
    watch.check()
    caller.tired = False
    watch.check()
    with pytest.raises(Interrupt):
        watch.end()


def test_one_that_loads_weights_all_the_same_is_not_short(caller):
    """As where the file of a loaded model has changed."""
    watch = Watch(caller.check, caller.seen.append, is_short=True)
    watch.on_progress("read")
    assert caller.seen == ["read"]
    caller.tired = True
    with pytest.raises(Interrupt):
        watch.check()
    again = Watch(caller.check, caller.seen.append, is_short=True)
    again.check()
    with pytest.raises(Interrupt):
        again.on_progress("read")
