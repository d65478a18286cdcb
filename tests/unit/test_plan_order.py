"""Which of several plans that would run auto takes."""

from dataclasses import replace
from pathlib import Path

import pytest
from published import CASES, FLUX, L40, WAN, Case

from backend.config import ParallelConfig
from backend.planner import drift
from backend.planner.choose import AUTO, FASTER_TURNS, MEMORY, Question, choose, ranked
from backend.planner.cost import Cost
from backend.planner.machine import Machine, RequestEstimate
from backend.planner.memory import held
from backend.planner.model_shape import Activations
from backend.planner.option import TIGHT, Option
from backend.planner.weight_swaps import WeightSwaps

GB = 1_000_000_000


def test_a_plan_that_may_run_out_of_memory_has_to_be_faster():
    """HunyuanVideo in fp8 on two cards: PipeFusion's buffers filled them for 5 % of the time."""
    shape = replace(WAN, activations=Activations(replicated=2e5, cut=2e5))
    others = set()
    for gigabytes in range(30, 80, 2):
        question = Question(
            shape, RequestEstimate(32760, 512, 20, 1), replace(L40, memory=(gigabytes * GB,) * 2), 2
        )
        fitting = [each for each in question.options() if each.fits]
        best = choose(question).option
        nominal = min(fitting, key=lambda each: each.score / (1 if each.likely <= each.room else TIGHT))
        others |= {gigabytes} if nominal.plan != best.plan else set()
    assert others  # where the fastest plan would have filled the cards


def test_a_faster_plan_says_why_it_is_not_taken():
    chosen = Option(ParallelConfig(tensor_parallel_degree=2), 10.0, bytes=10, room=20, likely=12)
    assert replace(chosen, seconds=9.0, likely=25).why_not(chosen) == "faster, but it may run out of memory"
    assert "drifts further" in replace(chosen, seconds=9.0, drift=1.1).why_not(chosen)
    assert "error of the estimate" in replace(chosen, seconds=9.95).why_not(chosen)
    assert "about as fast" in replace(chosen, seconds=9.95).why_not(chosen, looks_alike=True)
    assert replace(chosen, seconds=10.5).why_not(chosen) == ""
    few_steps = choose(
        Question(WAN, RequestEstimate(4096, 512, 8, 1), replace(L40, memory=(40 * GB,) * 2), 2)
    )
    assert any("; faster" in line for line in few_steps.lines), few_steps.lines


def test_a_simpler_plan_that_is_nearly_as_fast_comes_first():
    """Runners-up too: 1 % is within the error of the estimate. The least memory goes by bytes."""
    one = Option(ParallelConfig(), 15.0, bytes=10, room=20, likely=12)
    tensor = replace(one, plan=ParallelConfig(tensor_parallel_degree=2), seconds=10.0, bytes=6)
    ulysses = replace(one, plan=ParallelConfig(ulysses_degree=2), seconds=10.1)
    slower = replace(one, plan=ParallelConfig(ring_degree=2), seconds=15.1)
    assert ranked([one, tensor, slower, ulysses]) == [ulysses, tensor, one]
    assert ranked([one, tensor, slower, ulysses], MEMORY) == [tensor, ulysses, one, slower]


def experts(gigabytes: float, host: int = 0, steps: int = 20) -> Question:
    """One of two experts on two cards."""
    machine = replace(L40, memory=(gigabytes * GB,) * 2)
    request, swaps = RequestEstimate(32760, 512, steps, 2), WeightSwaps(host)
    return Question(WAN, request, machine, 2, others=(WAN,), swaps=swaps)


def test_experts_take_turns_where_that_is_faster():
    """Wan 2.2: together they fit by tensor parallelism, PipeFusion or sharded; each alone by CFG."""
    question = experts(42)
    assert any(each.fits for each in question.options())
    choice = choose(question)
    assert choice.plan.cfg_degree == 2 and choice.option.swap_seconds > 0
    assert any(FASTER_TURNS in line and "s each time" in line for line in choice.lines)
    together = min(each.seconds for each in question.options() if each.fits)
    assert choice.option.seconds < together


@pytest.mark.parametrize("spare, reads", [(0, False), (-GB, True)])
def test_one_expert_is_parked_while_the_other_one_still_is(spare, reads):
    """Half of the memory that is free then is for it."""
    question = experts(42)
    plan = choose(question).plan
    size = held(WAN, plan, question.request).weights
    asked = (WAN, plan, question.request, (WAN,), L40.host_link)
    assert WeightSwaps(plan.world_size * size * 3 // 2 + spare).swap(*asked)[1] == reads


def test_experts_stay_where_the_change_takes_longer():
    """Of few steps, of a host without memory for the one that waits, and for the least memory."""
    for question, method in (
        (experts(42, steps=1), AUTO),
        (experts(42, host=GB, steps=6), AUTO),
        (experts(42), MEMORY),
    ):
        assert not choose(question, method).option.swap_seconds, question
    assert choose(experts(42, steps=6)).option.swap_seconds
    assert not choose(experts(200)).option.swap_seconds  # where all fits, nothing waits


def test_drift_is_that_of_the_page():
    """The least over cfg, of reuse after one step of warm-up."""
    page = (Path(__file__).parents[2] / "docs/drift.md").read_text()
    measured: dict[int, dict[int, float]] = {}
    for line in page.splitlines():
        cells = [each.strip() for each in line.strip("| ").split("|")]
        if len(cells) == 8 and cells[0].isdecimal() and cells[3] == "1":
            row = measured.setdefault(int(cells[0]), {})
            size, decibels = int(cells[2]), float(cells[4].split(" / ")[0])
            row[size] = min(decibels, row.get(size, decibels))
    assert drift.MEASURED == measured


@pytest.mark.parametrize("steps, most", [(8, 4), (15, 4), (16, 8), (28, 8)])
def test_few_steps_have_few_patches(steps, most):
    machine = replace(L40, memory=(48 * GB,) * 4)
    options = Question(FLUX, RequestEstimate(4096, 512, steps, 1), machine, 4).options()
    assert max(each.plan.patches for each in options if each.plan.has_stale_kv) == most


def test_what_can_be_seen_has_to_be_faster():
    few, some, many = (drift.penalty(steps, 4) for steps in (8, 12, 28))
    assert few > some > many == drift.STALE
    assert drift.penalty(8, 2) < few and drift.penalty(100, 16) == many


@pytest.mark.parametrize(
    "fields",
    [
        {"ring_degree": 4},
        {"tensor_parallel_degree": 4},
        {"ring_degree": 2, "tensor_parallel_degree": 2},
        {"ulysses_degree": 4, "shard_weights": True},
        {"pipefusion_degree": 4},
        {"ring_degree": 2, "data_parallel_degree": 2, "shard_weights": True},
    ],
    ids=str,
)
def test_plans_of_bridged_pairs_go_at_the_pace_of_the_slow_links(fields):
    """Four GPUs with two bridges: pairs are fast, what spans both is not. On machines of bytes alone."""
    far = Machine("links", 1e30, 1e30, 1e30, 50e9, {4: 50e9}, latency=0.0, launch=0.0)
    bridged = replace(far, rings={2: 50e9, 4: 5e9})
    plan, request = ParallelConfig(**fields), RequestEstimate(4096, 512, 8, 1, batch=2)
    seconds = [Cost(FLUX, plan, each, request).total for each in (bridged, far)]
    assert seconds[0] > 2 * seconds[1]
    for pair in ({"ring_degree": 2}, {"tensor_parallel_degree": 2}, {"pipefusion_degree": 2}):
        costs = [Cost(FLUX, ParallelConfig(**pair), each, request).total for each in (bridged, far)]
        assert costs[0] == costs[1]


@pytest.mark.parametrize("name", ["rings", "host_link", "float32"])
def test_rates_without_what_is_measured_now_are_none_of_this_version(name):
    values = L40.as_dict()
    assert Machine.from_dict(values) == replace(L40, memory=())
    del values[name]
    with pytest.raises(KeyError):
        Machine.from_dict(values)
    with pytest.raises(ValueError):
        Machine.from_dict({**L40.as_dict(), "host_link": 0.0})


def test_what_computes_in_float32_takes_as_much_longer():
    """As on Volta and Turing, of models that are not in float16; tokens take twice as long on the way."""
    turing, wide = replace(L40, float32=6.0, launch=0.0), replace(FLUX, itemsize=4)
    alone, ulysses = ParallelConfig(), ParallelConfig(ulysses_degree=2)
    request = RequestEstimate(4096, 512, 8, 1)

    def seconds(shape, plan) -> float:
        return Cost(shape, plan, turing, request).total

    assert seconds(wide, alone) == pytest.approx(6 * seconds(FLUX, alone), rel=0.01)
    speedups = [seconds(shape, alone) / seconds(shape, ulysses) for shape in (FLUX, wide)]
    assert speedups[0] < speedups[1] < 2


def slower(machine: Machine, times: float) -> Machine:
    """A machine whose ranks take so many times as long to compute, and whose links are the same."""
    rates = {name: getattr(machine, name) / times for name in ("gemm", "attention", "bandwidth")}
    return replace(machine, **rates, launch=machine.launch * times, overhead=machine.overhead * times)


def fastest(case: Case, machine: Machine) -> str:
    return min(case.plans, key=lambda name: case.projected(name, machine))


def test_a_measured_time_of_one_gpu_would_choose_no_other_plan():
    """Why auto leaves alone what nodes/host/one_rank.py notes. One GPU takes 0.69 to 1.78 times as long in
    published tables as is projected. Rates by which it takes just that have the same plan of each table for
    the fastest."""
    ratios = []
    for case in CASES:
        one = next((name for name, plan in case.plans.items() if plan.world_size == 1), None)
        if one is None:
            continue
        ratios.append(case.seconds[one] / case.projected(one))
        measured = slower(case.machine, ratios[-1])
        assert case.projected(one, measured) == pytest.approx(case.seconds[one])
        assert fastest(case, measured) == fastest(case, case.machine), f"{case.model.name}, {case.source}"
    assert len(ratios) > 20 and min(ratios) < 0.7 and max(ratios) > 1.7
