"""What ranks write down of their steps, and who reads it."""

import itertools
import mmap
import threading
import time
from types import SimpleNamespace

import pytest

from backend.parallel import comm
from backend.protocol import Release, Shutdown
from backend.protocol.heartbeats import Heartbeats
from backend.protocol.step_times import RECORDS, StepRing, StepTime
from backend.rank.leader import Leader
from backend.serving.step_times import StepClock, noted


@pytest.fixture
def ring():
    return StepRing(memoryview(mmap.mmap(-1, StepRing.SIZE)))


def test_the_latest_records_stay(ring):
    assert list(ring.read()) == []
    for step in range(RECORDS + 10):
        ring.append(StepTime(1, step, 0.5 * step, 0.5, 0.1, 7 * step))
    found = list(ring.read())
    assert [each.step for each in found] == list(range(11, RECORDS + 10))
    assert found[-1] == StepTime(1, RECORDS + 9, 0.5 * (RECORDS + 9), 0.5, 0.1, 7 * (RECORDS + 9))


def test_each_rank_has_its_own(tmp_path):
    """Also where slots and ranks are numbered otherwise, as on the second of two machines."""
    beats = Heartbeats.make(2, tmp_path)
    joined = Heartbeats.join(beats.path)
    joined.start(0, 3)
    joined.start(1, 2)
    joined.ring(0).append(StepTime(1, 0, 0.0, 1.0, 0.0, 30))
    joined.ring(1).append(StepTime(1, 0, 0.0, 1.0, 0.0, 20))
    while len(beats.read()) < 2:
        pass
    assert [beats.step_times(rank)[0].sent for rank in (2, 3)] == [20, 30]
    assert beats.step_times(0) == []
    assert {beat.rank for beat in beats.read()} == {2, 3}
    beats.close()


def test_a_step_is_what_lies_between_two_begins(ring, monkeypatch):
    """A solver's second evaluation belongs to its step; a wait and the bytes sent are those of the step."""
    now = [100.0]
    monkeypatch.setattr("backend.serving.step_times.time.monotonic", lambda: now[0])
    clock = StepClock(ring)

    def at(seconds, step, waited=0.0, sent=0):
        now[0] = 100.0 + seconds
        monkeypatch.setattr(comm.WAIT_CLOCK, "seconds", waited)
        monkeypatch.setattr(comm, "SENT", {"ulysses": sent})
        clock.begin(step)

    clock.new_request()
    at(0, 0, 5.0)
    at(1, 0, 5.5, 10)
    at(2, 1, 6.0, 30)
    at(5, None, 6.5, 70)
    at(9, None)
    assert list(ring.read()) == [StepTime(1, 0, 100.0, 2.0, 1.0, 30), StepTime(1, 1, 102.0, 3.0, 0.5, 40)]


def test_a_rank_says_in_which_steps_it_may_compile(tmp_path):
    """The last begin ends the last step."""
    beats = Heartbeats.make(1, tmp_path)
    beats.start(0, 3)
    while not beats.read():
        time.sleep(0.01)
    clock = StepClock(beats.ring(0))
    clock.compiling = (0, 2)
    found = []
    for step in (0, 1, 2, 3, None):
        clock.begin(step)
        found.append(beats.read()[0].compiles)
    assert found == [True, False, True, False, False]
    assert len(beats.step_times(3)) == 4


def test_without_a_reader_nothing_is_written():
    StepClock(None).begin(0)
    StepClock(None).note_memory(1)
    assert noted(None, 0) == {"device_bytes": 0, "steps": []}


def test_a_step_that_begins_while_they_are_read_has_begun(monkeypatch):
    """Its seconds from now are negative."""
    clock = itertools.count(100.0)
    monkeypatch.setattr("backend.serving.step_times.time.monotonic", lambda: next(clock))
    latest = SimpleNamespace(
        step_times=lambda rank: [StepTime(1, 0, next(clock), 0.5, 0.0, 0)], device_bytes=lambda rank: 0
    )
    assert noted(latest, 0)["steps"] == [[1, 0, -1.0, 0.5, 0.0, 0]]


def test_what_a_rank_has_of_its_device_is_read_apart_from_its_steps(tmp_path):
    beats = Heartbeats.make(2, tmp_path)
    beats.start(0, 5)
    clock = StepClock(beats.ring(0))
    while not beats.read():
        time.sleep(0.01)
    for size in (3 << 40, 7):
        clock.note_memory(size)
        for step in (0, None):
            clock.begin(step)
        assert noted(beats, 5)["device_bytes"] == size and noted(beats, 4)["device_bytes"] == 0
    assert len(noted(beats, 5)["steps"]) == 2


@pytest.mark.parametrize("is_leader", [True, False])
def test_every_rank_notes_its_memory_after_each_message(ring, is_leader):
    """It has what the message made, or gave back."""
    rank = Leader.__new__(Leader)
    rank.mesh = SimpleNamespace(rank=0)
    rank.clock = StepClock(ring)
    memory = SimpleNamespace(release=lambda: None, reserved=lambda: 7)
    rank.engine = SimpleNamespace(memory=memory)
    messages = [Release([0]), Shutdown()]
    rank.control = SimpleNamespace(receive=lambda: messages.pop(0), broadcast=lambda message: None)
    rank.server = SimpleNamespace(
        jobs=SimpleNamespace(
            next=lambda seconds: SimpleNamespace(
                message=messages.pop(0),
                is_abandoned=False,
                reply=lambda answer: None,
                cancelled=threading.Event(),
            ),
            finish=lambda job: None,
        ),
        write_out=lambda: None,
    )
    rank.lead() if is_leader else rank.follow()
    assert ring.device_bytes == 7


def test_a_wait_is_summed():
    waiting = comm.WaitClock()
    for _ in range(2):
        with waiting:
            pass
    first = waiting.seconds
    with pytest.raises(ConnectionError), waiting:
        raise ConnectionError
    assert waiting.seconds > first > 0
