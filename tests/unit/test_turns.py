"""Plans for models of one graph that do not fit on the ranks together, or not next to ComfyUI's own."""

from dataclasses import replace

import pytest
from published import A100, FLUX, L40, WAN

from backend.client.auto import measurements
from backend.client.auto.model_choice import ModelChoice
from backend.config import ConfigError, ParallelConfig
from backend.planner.choose import ASIDE, TURNS, Question, choose, ranked
from backend.planner.machine import Machine, RequestEstimate
from backend.planner.option import Option
from backend.planner.placement import Ranks
from backend.planner.weight_swaps import WeightSwaps

GB = 1_000_000_000


def two_experts(gigabytes: float, machine: Machine = A100) -> Question:
    """Two models of 28 GB on two ranks with so much memory each."""
    memory = (round(gigabytes * GB),) * 2
    return Question(WAN, RequestEstimate(32760, 512, 4, 1), replace(machine, memory=memory), 2, others=(WAN,))


def test_both_stay_where_they_fit_together():
    choice = choose(two_experts(80))
    assert not choice.option.swap_seconds and choice.option.bytes > 2 * WAN.weights / choice.plan.world_size


def test_they_take_turns_where_one_fits():
    question = two_experts(28)
    choice = choose(question)
    assert choice.lines[1].startswith(TURNS)
    alone = replace(question, others=()).option(choice.plan)
    assert choice.option.bytes == alone.bytes
    assert choice.option.seconds == pytest.approx(alone.seconds + choice.option.swap_seconds)


@pytest.mark.parametrize(
    "seconds, drift, likely, spared",
    [
        (129.0, 1.0, 30, True),
        (130.5, 1.0, 30, True),  # slower by less than the estimate's error
        (132.0, 1.0, 30, False),
        (129.0, 1.1, 30, False),
        (129.0, 1.0, 36, False),  # it may run out of memory
    ],
)
def test_they_take_no_turns_that_gain_nothing(seconds, drift, likely, spared):
    """A plan in turns of fewer mechanisms was taken, though one with which both fit is as fast."""
    one = Option(ParallelConfig(), 250.0, bytes=30, room=32, likely=30)
    waits = Option(ParallelConfig(ring_degree=2), 130.0, bytes=18, room=32, likely=20, swap_seconds=1.5)
    plan = ParallelConfig(ring_degree=2, shard_weights=True)
    together = Option(plan, seconds, bytes=30, room=32, likely=likely, drift=drift)
    assert waits.score < together.score
    ordered = ranked([one, waits, together])
    assert (waits not in ordered) == spared and together in ordered


def test_sharded_weights_take_no_turns_through_host_memory():
    """They are freed and read again (rank/worker.py), whole by every rank, which was counted as a copy from
    host memory, and then as one file for all."""
    question = two_experts(28)
    assert choose(replace(question, others=())).plan.shard_weights
    sharded = [each for each in question.in_turns() if each.plan.shard_weights]
    assert all(each.rereads and each.swap_seconds > 2 * WAN.weights / 1.6e9 for each in sharded)
    assert not choose(question).plan.shard_weights


def test_one_that_does_not_fit_alone_is_refused():
    with pytest.raises(ConfigError, match="does not fit: the leanest plan"):
        choose(two_experts(12))


def test_on_the_cpu_nothing_waits_elsewhere():
    """Host memory is what the ranks have."""
    with pytest.raises(ConfigError, match="does not fit"):
        choose(two_experts(28, replace(A100, on_host=True)))


def test_quantized_weights_are_copied_one_way():
    """Their copy in host memory stays while they are on the GPU; also where they make room for ComfyUI's."""
    question, plan = two_experts(28), ParallelConfig(ulysses_degree=2)
    quantized = replace(WAN, is_quantized=True)
    whole = question.option(plan).swap_seconds
    for shapes, part in (((quantized, quantized), 0.5), ((WAN, quantized), 0.5), ((quantized, WAN), 1.0)):
        changed = replace(question, shape=shapes[0], others=shapes[1:]).option(plan).swap_seconds
        assert changed == pytest.approx(part * whole)
    room, again = next_to_comfyui(1), replace(next_to_comfyui(1), shape=replace(FLUX, is_quantized=True))
    aside = room.option(plan).yield_seconds
    assert aside > 0 and again.option(plan).yield_seconds == pytest.approx(aside / 2)


def test_turns_go_at_the_measured_pace_of_the_host_link():
    question = two_experts(28)
    swap = choose(question).option.swap_seconds
    fast = replace(question, machine=replace(question.machine, host_link=5 * question.machine.host_link))
    assert choose(fast).option.swap_seconds == pytest.approx(swap / 5)


@pytest.mark.parametrize(
    "file, says", [(0.0, "at 1.5 GB/s, which is assumed"), (6e9, "at the 6.0 GB/s of its last load")]
)
def test_what_the_host_has_no_room_for_is_read_at_the_pace_of_the_last_load(file, says):
    choice = choose(replace(two_experts(28), swaps=WeightSwaps(GB, file)))
    own = choose(two_experts(28)).option
    assert (
        choice.option.swap_seconds > own.swap_seconds
        and says in choice.lines[1]
        and "from its file" in choice.lines[1]
    )
    assumed = choose(replace(two_experts(28), swaps=WeightSwaps(GB))).option.swap_seconds
    assert choice.option.swap_seconds == pytest.approx(assumed * 1.5e9 / (file or 1.5e9))


def next_to_comfyui(left: float, **changes) -> Question:
    """One model of 24 GB on two ranks, on whose first GPU ComfyUI has left so many GB of weights."""
    machine = replace(L40, memory=(48 * GB,) * 2)
    request = RequestEstimate(4096, 512, 20, 1)
    question = Question(
        FLUX, request, machine, 2, swaps=WeightSwaps(left_by_comfyui=((0, round(left * GB)),))
    )
    return replace(question, **changes)


def test_a_plan_that_leaves_comfyui_room_is_taken_where_it_costs_less():
    """Exact ones: those with all weights on the first GPU are the fastest, if these can stay."""
    exact = "fastest exact"
    free, short = choose(next_to_comfyui(30), exact), choose(next_to_comfyui(13), exact)
    assert free.plan.sp_degree == 2 and not free.option.yield_seconds
    assert short.plan.sp_degree == 1 or short.plan.shard_weights
    assert (
        not short.option.yield_seconds and f"{ASIDE}0: this plan's weights leave room for them" in short.lines
    )
    again = next_to_comfyui(13).option(free.plan)
    weights = FLUX.weights
    assert again.yield_seconds == pytest.approx(2 * weights / L40.host_link, rel=0.02)
    assert again.seconds == pytest.approx(free.option.seconds + again.yield_seconds)


def test_weights_leave_where_a_plan_that_leaves_room_is_slower():
    """Of many steps, what moves once a run is little."""
    many = next_to_comfyui(13, request=RequestEstimate(4096, 512, 500, 1))
    choice = choose(many, "fastest exact")
    assert choice.plan == choose(next_to_comfyui(30, request=many.request), "fastest exact").plan
    assert choice.option.yield_seconds > 0
    assert (
        f"{ASIDE}0: weights leave for them and come back (about {choice.option.yield_seconds:.1f} s"
        in choice.lines[1]
    )


def test_sharded_weights_that_leave_are_read_again():
    """They cannot wait in host memory (rank/worker.py), and each rank reads the whole file, as in the last
    load, whose rate is that of all ranks."""
    plan = ParallelConfig(ulysses_degree=2, shard_weights=True)
    option = next_to_comfyui(1).option(plan)
    assert option.rereads and option.yield_seconds == pytest.approx(2 * FLUX.weights / 1.5e9)


def test_sharded_weights_are_read_again_in_the_seconds_of_their_last_load(monkeypatch, tmp_path):
    """Four ranks, 10 s: a quarter of them was counted for a turn, for ComfyUI's room and for a move."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").write_bytes(b"1")
    model = ModelChoice(str(tmp_path / "model"))
    measurements.note_load_rate(model, "cuda", [{"bytes_read": FLUX.weights, "seconds": 10.0}] * 4)
    rate = measurements.load_rate(model, "cuda")
    plan, request = ParallelConfig(ulysses_degree=4, shard_weights=True), RequestEstimate()
    swaps = WeightSwaps(file=rate, left_by_comfyui=((0, 0),))
    again = swaps.yield_time(FLUX, plan, request, (), L40.host_link)
    turn = swaps.swap(FLUX, plan, request, (FLUX,), L40.host_link)
    assert again == turn == (pytest.approx(10.0), True)
    move = Ranks(ParallelConfig(tensor_parallel_degree=4), (FLUX,), {}, rate).change(plan, request)
    assert move == pytest.approx(10.0)


def test_only_ranks_on_comfyuis_gpu_wait():
    question = next_to_comfyui(1, swaps=WeightSwaps(left_by_comfyui=((1, GB),)))
    assert not question.option(ParallelConfig()).yield_seconds
    stages = question.option(ParallelConfig(pipefusion_degree=2, num_pipeline_patch=1))
    assert 0 < stages.yield_seconds < 2 * 0.6 * FLUX.weights / L40.host_link


def test_models_that_take_turns_leave_once():
    """The one that has left for ComfyUI's does not leave for the next one."""
    question = replace(two_experts(28), swaps=WeightSwaps(left_by_comfyui=((0, GB),)))
    assert choose(question).option == choose(two_experts(28)).option
