"""When a user is told that no step ends, and what of the ranks."""

from types import SimpleNamespace

import pytest

from backend.client import silence, step_timer
from backend.client.step_timer import (
    BEGINS,
    COMPILED_SECONDS,
    COMPILES,
    EARLY_STEPS,
    FIRST_SECONDS,
    MIN_SECONDS,
    TIMES,
    StepTimer,
)
from backend.protocol.heartbeats import Heartbeats
from backend.protocol.step_times import StepTime


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(step_timer.time, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize(
    "compile, steps, patience",
    [
        ("off", (), FIRST_SECONDS),
        ("blocks", (), COMPILED_SECONDS),
        ("auto", (), FIRST_SECONDS),  # where nobody has planned, blocks are not compiled
        ("blocks", (200.0,), COMPILED_SECONDS),  # patches, after one step of warm-up
        ("blocks", (200.0, 300.0), MIN_SECONDS),
        ("blocks", (200.0, 300.0, 30.0), TIMES * 30),
        ("off", (200.0,), MIN_SECONDS),  # the first is no measure
        ("off", (200.0, 2.0, 1.0), MIN_SECONDS),
        ("off", (200.0, 30.0, 1.0), TIMES * 30),
    ],
)
def test_a_step_that_does_not_end_is_told_once(clock, caplog, compile, steps, patience):
    watched = StepTimer(compile, lambda done: f"all after {done}")
    for seconds in steps:
        clock.now += seconds
        watched.step()
    clock.now += patience - 1
    watched.look()
    assert caplog.messages == []
    clock.now += 1
    watched.look()
    watched.look()
    (told,) = caplog.messages
    assert f"no step has ended for {patience:.0f} s" in told and f"all after {len(steps)}: " not in told
    assert f"lives: all after {len(steps)}. " in told and "press Cancel" in told


@pytest.mark.parametrize(
    "compile, warmup, reasons",
    [
        ("off", 1, [BEGINS, "", ""]),
        ("blocks", 1, [COMPILES, COMPILES, ""]),
        ("blocks", 2, [COMPILES, "", COMPILES]),
    ],
)
def test_what_a_step_does_first_is_told(clock, compile, warmup, reasons):
    watched = StepTimer(compile, lambda done: "", warmup)
    found = []
    for _ in reasons:
        found.append(watched.reason)
        watched.step()
    assert found == reasons


@pytest.mark.parametrize("longest, reason", [(0.0, BEGINS), (2.0, "")])
def test_only_the_first_call_of_a_model_begins(clock, longest, reason):
    assert StepTimer("off", lambda done: "", longest=longest, has_progress=False).reason == reason


def test_steps_of_a_long_warm_up_compile_nothing(clock):
    watched = StepTimer("blocks", lambda done: "", warmup=3)
    times = []
    for _ in range(5):
        times.append(watched.compiling)
        watched.step()
    assert times == [COMPILED_SECONDS, 0, 0, COMPILED_SECONDS, 0]


def test_nothing_is_told_of_ranks_that_nobody_sees(clock, caplog):
    watched = StepTimer("off", lambda done: "")
    clock.now = 1e6
    watched.look()
    assert caplog.messages == []


def test_the_step_of_each_rank(tmp_path):
    """Rank 2 has not begun with the request; its records are those of one before."""
    beats = Heartbeats.make(3, tmp_path)
    for rank, (request, last) in enumerate([(2, 3), (2, 2), (1, 7)]):
        beats.start(rank, rank)
        ring = beats.ring(rank)
        for step in range(last + 1):
            ring.append(StepTime(request, step, 0.0, 1.0, 0.0, 0))
    watch = silence.SilenceWatch(beats, print)
    try:
        while len(beats.read()) < 3:
            pass
        assert watch.steps_of_ranks(4) == "rank 0 in step 5 and rank 1 in step 4 and rank 2 in step 1"
        assert watch.steps_of_ranks(0) == "ranks 0, 1, 2 in step 1"
    finally:
        watch.stop()


def test_steps_that_compile_are_no_measure_of_later_requests(clock):
    """Cancel would wait for twice as long as a compiler takes."""
    watched = StepTimer("blocks", lambda done: "", longest=2.0)
    for seconds in (900.0, 700.0, 3.0):  # the first step, the first one with patches
        clock.now += seconds
        watched.step()
    assert (watched.longest, watched.longest_without_compile) == (900.0, 3.0)


def test_the_step_under_way_counts_while_progress_may_come_early(clock):
    """It says that a step's kernels wait on the GPU; later steps end as fast as the GPU computes. One that
    never ends must not keep Cancel for ever."""
    watched = StepTimer("off", lambda done: "")
    for _ in range(EARLY_STEPS):
        clock.now += 70.0
        assert watched.likely == 70.0
        clock.now += FIRST_SECONDS
        assert watched.likely == FIRST_SECONDS
        clock.now -= FIRST_SECONDS + 69.0
        watched.step()
    clock.now += 70.0
    assert watched.likely == watched.longest == 1.0


@pytest.mark.parametrize("longest, likely", [(0.0, 70.0), (2.0, 2.0)])
def test_the_step_under_way_of_a_call_counts_while_no_call_of_the_model_is_measured(clock, longest, likely):
    """A call is one step, which its Result ends: those before are a measure, and one that hangs is none."""
    watched = StepTimer("off", lambda done: "", longest=longest, has_progress=False)
    clock.now += 70.0
    assert watched.likely == likely
