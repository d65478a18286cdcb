"""Plans for models of one graph that do not fit on the ranks together."""

from dataclasses import replace

import pytest
from published import A100, WAN

from backend.config import ConfigError
from backend.planner.choose import TURNS, Question, choose
from backend.planner.machine import Machine, Request
from backend.planner.waiting import Waiting

GB = 1_000_000_000


def two_experts(gigabytes: float, machine: Machine = A100) -> Question:
    """Two models of 28 GB on two ranks with so much memory each."""
    memory = (round(gigabytes * GB),) * 2
    return Question(WAN, Request(32760, 512, 4, 1), replace(machine, memory=memory), 2, others=(WAN,))


def test_both_stay_where_they_fit_together():
    choice = choose(two_experts(80))
    assert not choice.option.swap and choice.option.bytes > 2 * WAN.weights / choice.plan.world_size


def test_they_take_turns_where_one_fits():
    question = two_experts(28)
    choice = choose(question)
    assert choice.lines[1].startswith(TURNS)
    alone = replace(question, others=()).option(choice.plan)
    assert choice.option.bytes == alone.bytes
    assert choice.option.seconds == pytest.approx(alone.seconds + choice.option.swap)


def test_sharded_weights_take_no_turns_through_host_memory():
    """They are freed and read again (rank.py), which was counted as a copy from host memory."""
    question = two_experts(28)
    assert choose(replace(question, others=())).plan.shard_weights
    sharded = [each for each in question.in_turns() if each.plan.shard_weights]
    assert all(each.reads and each.swap > WAN.weights / 1.6e9 for each in sharded)
    assert not choose(question).plan.shard_weights


def test_one_that_does_not_fit_alone_is_refused():
    with pytest.raises(ConfigError, match="does not fit: the leanest plan"):
        choose(two_experts(12))


def test_on_the_cpu_nothing_waits_elsewhere():
    """Host memory is what the ranks have."""
    with pytest.raises(ConfigError, match="does not fit"):
        choose(two_experts(28, replace(A100, on_host=True)))


def test_turns_go_at_the_measured_pace_of_the_host_link():
    question = two_experts(28)
    swap = choose(question).option.swap
    fast = replace(question, machine=replace(question.machine, host_link=5 * question.machine.host_link))
    assert choose(fast).option.swap == pytest.approx(swap / 5)


@pytest.mark.parametrize(
    "file, says", [(0.0, "at 1.5 GB/s, which is assumed"), (6e9, "at the 6.0 GB/s of its last load")]
)
def test_what_the_host_has_no_room_for_is_read_at_the_pace_of_the_last_load(file, says):
    choice = choose(replace(two_experts(28), waiting=Waiting(GB, file)))
    own = choose(two_experts(28)).option
    assert choice.option.swap > own.swap and says in choice.lines[1] and "from its file" in choice.lines[1]
    assumed = choose(replace(two_experts(28), waiting=Waiting(GB))).option.swap
    assert choice.option.swap == pytest.approx(assumed * 1.5e9 / (file or 1.5e9))
