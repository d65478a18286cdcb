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
    RequestEstimate(1024, 128, 8, 1),
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
    assert seconds(made) == seconds(10 * made) == pytest.approx(moved / 8)
    assert seconds(made // 2) == pytest.approx(moved * (0.5 + 0.5 / 8))
    assert seconds(made, replace(REQUEST, drained=True)) == pytest.approx(moved)
    assert seconds(made, replace(REQUEST, prompts=2)) == pytest.approx(moved / 16)
    pipeline = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=3, warmup_steps=1)
    assert Cost(flux, pipeline, L40, REQUEST)._passes == 1 + 7 * 3


def test_few_passes_are_counted_each_on_gpus(flux):
    """These give the memory back after a request; on a CPU what is large goes back by itself."""
    made = sum(block.unpacked for block in flux.blocks)

    def seconds(steps: int, prompts: int = 1, on_host: bool = False) -> float:
        request = replace(REQUEST, steps=steps, prompts=prompts)
        return Cost(flux, PLAN, replace(L40, on_host=on_host), request, made)._dequantize(flux.blocks)

    every = seconds(1)
    assert seconds(2) == seconds(1, prompts=2) == pytest.approx(every)
    assert seconds(2, on_host=True) == seconds(1, prompts=2, on_host=True) == pytest.approx(every / 2)
    assert seconds(20) == seconds(20, on_host=True) == pytest.approx(every / 20)


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
    """In addition to what is likely, all of which but the weights may be more."""
    asked = []
    monkeypatch.setattr(asking, "spare_bytes", lambda left, likely: asked.append((left, likely)) or 0)
    question = Question(flux, REQUEST, replace(L40, memory=(40 * GB,)), 1)
    option = question.option(PLAN)
    needs = held(flux, PLAN, REQUEST)
    assert asked == [(option.room - option.likely, needs.likely - needs.weights)]
