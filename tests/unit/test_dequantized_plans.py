"""What the planner counts of weights that stay dequantized through a request."""

from dataclasses import replace

import pytest
import torch
from headers import opened
from published import L40

from backend.config import ParallelConfig
from backend.planner import question as asking
from backend.planner.choose import Question
from backend.planner.cost import Cost
from backend.planner.machine import RequestEstimate
from backend.planner.memory import held
from backend.rank_plan.shape_of import shape_of

FP8, PLAN, REQUEST = (
    "var__flux1-kontext_fp8_scaled_legacy",
    ParallelConfig(),
    RequestEstimate(1024, 128, 4, 1),
)
GB = 10**9


@pytest.fixture(scope="module")
def flux():
    return shape_of(opened(FP8), torch.bfloat16)


def test_the_planner_counts_the_first_pass_alone(flux):
    """Of what there is room for; of calls, which are requests of their own, every one."""
    made = sum(block.unpacked for block in flux.blocks)
    moved = sum(block.dequantizing for block in flux.blocks) / L40.bandwidth

    def seconds(spare: int, request: RequestEstimate = REQUEST) -> float:
        return Cost(flux, PLAN, L40, request, spare)._dequantize(flux.blocks)

    assert seconds(0) == pytest.approx(moved)
    assert seconds(made) == seconds(10 * made) == pytest.approx(moved / 4)
    assert seconds(made // 2) == pytest.approx(moved * (0.5 + 0.5 / 4))
    drained, single = replace(REQUEST, drained=True), replace(REQUEST, steps=1)
    assert seconds(made, drained) == seconds(made, single) == pytest.approx(moved)
    twice = replace(REQUEST, prompts=2)
    assert seconds(made, twice) == pytest.approx(moved / 8)
    assert seconds(made, replace(twice, steps=1)) == pytest.approx(moved / 2)
    pipeline = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=3, warmup_steps=1)
    assert Cost(flux, pipeline, L40, REQUEST)._passes == 1 + 3 * 3


def test_on_a_shared_gpu_few_passes_are_counted_each(flux):
    """The rank that gives memory back makes weights in each, and the others wait for it."""
    made = sum(block.unpacked for block in flux.blocks)

    def seconds(steps: int, gives_back: bool) -> float:
        cost = Cost(flux, PLAN, L40, replace(REQUEST, steps=steps), made, gives_back)
        return cost._dequantize(flux.blocks)

    every = Cost(flux, PLAN, L40, REQUEST)._dequantize(flux.blocks)
    assert seconds(2, True) == pytest.approx(every) and seconds(2, False) == pytest.approx(every / 2)
    assert seconds(20, True) == seconds(20, False) == pytest.approx(every / 20)
    machine = replace(L40, memory=(40 * GB,))
    few = [Question(flux, replace(REQUEST, steps=2), machine, 1, gives_back=each) for each in (True, False)]
    slow, fast = (each.option(PLAN).seconds for each in few)
    assert slow > fast


def test_a_plan_that_has_room_is_faster(flux):
    """On cards whose memory holds the weights of half the blocks twice more, and on such that it does not."""
    plan = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=2)
    tight, roomy = (
        Question(flux, REQUEST, replace(L40, memory=(size * GB,) * 2), 2).option(plan) for size in (11, 40)
    )
    assert roomy.seconds < 0.95 * tight.seconds
    assert tight.fits and roomy.bytes == tight.bytes
    question = Question(flux, REQUEST, replace(L40, memory=(40 * GB,) * 2), 2)
    assert question.option(plan).seconds == roomy.seconds
    # once ranks have run out of memory, or where PARALLEL_DIT_CACHE_DEQUANTIZED is 0, none stays dequantized
    assert replace(question, caches_dequantized=False).option(plan).seconds > roomy.seconds


def test_the_planner_leaves_as_much_as_the_ranks_do(flux, monkeypatch):
    """Beside what is likely, all of which but the weights may be more."""
    asked = []
    monkeypatch.setattr(asking, "spare_bytes", lambda left, likely: asked.append((left, likely)) or 0)
    question = Question(flux, REQUEST, replace(L40, memory=(40 * GB,)), 1)
    option = question.option(PLAN)
    needs = held(flux, PLAN, REQUEST)
    assert asked == [(option.room - option.likely, needs.likely - needs.weights)]
