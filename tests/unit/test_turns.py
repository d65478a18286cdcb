"""Plans for models of one graph that do not fit on the ranks together."""

from dataclasses import replace

import pytest
from published import A100, WAN

from backend.config import ConfigError
from backend.planner.choose import TURNS, Question, choose
from backend.planner.machine import Machine, Request

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
    alone = choose(replace(question, others=())).option
    assert choice.option.bytes == alone.bytes
    assert choice.option.seconds == pytest.approx(alone.seconds + choice.option.swap)


def test_one_that_does_not_fit_alone_is_refused():
    with pytest.raises(ConfigError, match="does not fit: the leanest plan"):
        choose(two_experts(12))


def test_on_the_cpu_nothing_waits_elsewhere():
    """Host memory is what the ranks have."""
    with pytest.raises(ConfigError, match="does not fit"):
        choose(two_experts(28, replace(A100, on_host=True)))
