"""Which of several plans that would run auto takes."""

from dataclasses import replace

from published import L40, WAN

from backend.planner.choose import Question, choose
from backend.planner.machine import Request
from backend.planner.model_shape import Activations

GB = 1_000_000_000


def test_plans_that_surely_fit_come_before_those_that_may():
    """HunyuanVideo in fp8 on two cards: PipeFusion's buffers filled them for 5 % of the time."""
    shape = replace(WAN, activations=Activations(replicated=2e5, cut=2e5))
    filled = []
    for gigabytes in range(30, 80, 2):
        question = Question(shape, Request(32760, 512, 20, 1), replace(L40, memory=(gigabytes * GB,) * 2), 2)
        options = question.options()
        best = choose(question).option
        assert best.surely_fits or not any(each.surely_fits for each in options)
        nominal = min((each for each in options if each.fits), key=lambda option: option.score)
        filled += [gigabytes] if nominal.plan != best.plan else []
    assert filled  # where the fastest plan would have filled the cards
