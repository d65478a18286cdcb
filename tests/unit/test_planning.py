"""Plans of auto that depend on memory: after ranks have run out of it, with models that take turns, and with
memory that others take or give back."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from published import L40, WAN

from backend.client import pool, status
from backend.client.auto import measurements, planning
from backend.client.auto.model_choice import ModelChoice
from backend.client.auto.plan_history import PlanHistory
from backend.config import ConfigError, ParallelConfig
from backend.planner.auto_config import AutoConfig, unused_method
from backend.planner.choose import ASIDE, PlanChoice
from backend.planner.machine import RESERVE, RequestEstimate
from backend.planner.weight_swaps import WeightSwaps
from backend.protocol import BackendError, RefusedError

GB = 1_000_000_000
MODEL = ModelChoice("model.safetensors")
ALL = AutoConfig()
GPUS = 4


@pytest.fixture
def machine(monkeypatch):
    """Four GPUs of a data sheet, whose free memory a test may change."""
    found = SimpleNamespace(free=(32 * GB,) * GPUS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)  # as of a torch for CPUs
    monkeypatch.setattr(measurements, "model_shape", lambda *_: WAN)

    def rates(device: str, indices: list[int], *_):
        return replace(L40, speeds=(1.0,) * len(indices))

    monkeypatch.setattr(measurements, "machine_rates", rates)
    monkeypatch.setattr(measurements, "free_memory", lambda device, indices, *_: found.free[: len(indices)])
    monkeypatch.setattr(measurements, "unified_among", lambda *_: ())
    monkeypatch.setattr(pool, "launched", lambda: None)
    monkeypatch.setattr(measurements, "load_rate", lambda *_: 0.0)
    monkeypatch.setattr(planning, "_history", PlanHistory())
    monkeypatch.setattr(planning, "LOOK_SECONDS", math.inf)
    return found


def run_ranks(monkeypatch, weights: list[int], device_bytes=(), is_busy=False, gpus="1,0"):
    """Have ranks of ours run, with ``weights`` and ``device_bytes`` of each."""
    config = ParallelConfig(data_parallel_degree=len(weights), gpus=gpus)
    found = SimpleNamespace(config=config, is_busy=is_busy)
    ranks = [
        {"weight_bytes": size, "device_bytes": reserved}
        for size, reserved in zip(weights, device_bytes or weights)
    ]
    monkeypatch.setattr(pool, "launched", lambda: found)
    monkeypatch.setattr(status, "report", lambda backend: SimpleNamespace(ranks=ranks))


def request(shape) -> RequestEstimate:
    return RequestEstimate(32760, 512, 20, 2)


def plan_for(auto: AutoConfig = ALL, others: tuple = ()) -> tuple[ParallelConfig, tuple[str, ...]]:
    return planning.plan_for(planning.Asked(auto, MODEL, request, others))


def spare_more(plan: ParallelConfig, auto: AutoConfig = ALL, others: tuple = ()) -> bool:
    return planning.spare_more(planning.Asked(auto, MODEL, request, others), plan)


def bytes_of(plan: ParallelConfig) -> int:
    return planning.question_of(planning.Asked(AutoConfig(), MODEL, request))[0].option(plan).bytes


def test_each_next_plan_needs_less_until_none_does(machine):
    sizes = []
    with pytest.raises(ConfigError, match="does not fit"):
        for _ in range(20):
            plan, lines = plan_for()
            assert bool(sizes) == ("ranks ran out of memory with a plan that left less" in lines[0])
            sizes.append(bytes_of(plan))
            assert spare_more(plan)
    assert len(sizes) > 1 and sizes == sorted(set(sizes), reverse=True)


def test_what_was_spared_is_forgotten(machine):
    first, lines = plan_for()
    spare_more(first)
    assert plan_for()[0] != first
    assert planning.spare_no_more(AutoConfig(), MODEL)
    assert plan_for() == (first, lines) and not planning.spare_no_more(AutoConfig(), MODEL)


def test_a_shortage_counts_for_its_model_and_gpus(machine):
    first, _ = plan_for()
    spare_more(first)
    assert planning.plan_for(planning.Asked(AutoConfig(), ModelChoice("other"), request))[0] == first
    two = AutoConfig(gpus="0,1")
    assert not any("ran out" in line for line in plan_for(two)[1])


def test_memory_that_others_have_taken_meanwhile_is_not_spared_twice(machine):
    first, _ = plan_for()
    machine.free = (bytes_of(first) // 2,) * GPUS
    assert spare_more(first)
    machine.free = (32 * GB,) * GPUS
    assert plan_for()[0] == first


def test_models_that_take_turns_run_again_before_any_memory_is_spared(machine, monkeypatch):
    """Together they never fitted, so what they would leave says nothing; and the other may have been there,
    which leaves for the next run. What the one that runs leaves free was 10 GB, withheld until a restart."""
    monkeypatch.setattr(planning, "have_ranks_run_out", lambda: True)
    machine.free = (24 * GB,) * GPUS
    first, lines = plan_for(others=(MODEL, MODEL))
    assert any("take turns" in line for line in lines)
    assert spare_more(first, others=(MODEL, MODEL))
    assert plan_for(others=(MODEL, MODEL)) == (first, lines)
    assert spare_more(first, others=(MODEL, MODEL))
    assert plan_for(others=(MODEL, MODEL))[0] != first
    planning.spare_no_more(ALL, MODEL)
    assert plan_for(others=(MODEL, MODEL)) == (first, lines)


def test_models_that_take_turns_and_are_refused_spare_at_once(machine):
    """Ranks have not run out of memory: the others had left, and the same plan would be refused again."""
    machine.free = (24 * GB,) * GPUS
    first, _ = plan_for(others=(MODEL, MODEL))
    assert spare_more(first, others=(MODEL, MODEL))
    assert plan_for(others=(MODEL, MODEL))[0] != first


def test_ranks_learn_that_the_plan_counts_on_turns(machine):
    """Of models that were planned so, and of ranks that run as planned."""
    other = ModelChoice("other.safetensors")
    assert not planning.takes_turns(MODEL, ParallelConfig())
    together, _ = plan_for(others=())
    assert not planning.takes_turns(MODEL, together)
    machine.free = (24 * GB,) * GPUS
    plan, _ = plan_for(others=(other, other))
    assert planning.takes_turns(MODEL, plan) and planning.takes_turns(other, plan)
    assert not planning.takes_turns(ModelChoice("third"), plan)
    assert not planning.takes_turns(MODEL, ParallelConfig(data_parallel_degree=4))


def too_large(shape) -> RequestEstimate:
    return RequestEstimate(2_000_000, 512, 20, 2, batch=4)


@pytest.mark.parametrize("references", [0, 4096])
def test_an_estimate_that_does_not_fit_takes_the_leanest_plan(machine, references):
    """The sampler plans again for its latent, which may be smaller, and have no references."""
    asked = []

    def large(shape) -> RequestEstimate:
        return replace(too_large(shape), reference_tokens=references)

    def run(auto: AutoConfig, request) -> ParallelConfig:
        asked.append((auto.method, request(WAN)))
        return planning.plan_for(planning.Asked(auto, MODEL, request))[0]

    machine.free = (12 * GB,) * GPUS
    with pytest.raises(ConfigError, match="2000000 tokens does not fit"):
        run(ALL, large)
    plan = planning.or_leanest(ALL, large, run)
    small = RequestEstimate(256, 512, 20, 2)
    assert asked[1:] == [("auto", large(WAN)), ("least memory", small)]
    question = planning.question_of(planning.Asked(ALL, MODEL, lambda shape: small))[0]
    assert question.option(plan).bytes <= 1.02 * min(each.bytes for each in question.options())


def test_a_model_that_fits_no_latent_is_refused_with_the_estimate(machine):
    machine.free = (4 * GB,) * GPUS
    with pytest.raises(ConfigError, match="2000000 tokens does not fit"):
        planning.or_leanest(
            ALL, too_large, lambda auto, request: planning.plan_for(planning.Asked(auto, MODEL, request))
        )


def test_one_gpu_has_nothing_to_choose(machine):
    auto = AutoConfig(gpus="1")
    assert not spare_more(ParallelConfig(), auto) and not planning._history.spared


@pytest.mark.parametrize(
    "error, memory",
    [
        (BackendError("rank 1 failed with FatalOutOfMemory: rank 1 ran out of memory in the middle"), True),
        (BackendError("rank 1 was killed by SIGKILL"), False),
        (RefusedError("steps is 0"), False),
    ],
)
def test_errors_of_memory(error, memory):
    assert planning.is_memory_shortage(error) == memory


def test_a_refusal_for_lack_of_memory_is_one(machine):
    error = RefusedError("rank 0 has too little")
    error.lacking = {0: 5}
    assert planning.is_memory_shortage(error)


def test_a_method_that_degrees_overrule_is_said():
    """It was ignored without a word."""
    two = ParallelConfig(ulysses_degree=2)
    remedy = "choose manual, or set it back to its default for auto."
    said = f"method auto is not used: ulysses_degree 2 is set; {remedy}"
    assert unused_method("auto", two) == said
    both = unused_method("least memory", ParallelConfig(ulysses_degree=2, shard_weights=True))
    assert "ulysses_degree 2, shard_weights True are set; choose manual, or set them back" in both
    assert not unused_method("manual", two) and not unused_method("auto", ParallelConfig())


def test_what_comfyui_takes_counts_for_requests_as_large(machine, monkeypatch):
    """And on its own GPU: rank 1's here. Not what it took from ranks that somebody placed."""
    auto = AutoConfig(gpus="1,0")
    plan, lines = plan_for(auto)
    assert not any(ASIDE in line for line in lines)
    left = []
    for config, size in ((ParallelConfig(data_parallel_degree=2), 0), (plan, 0), (plan, 5 * GB)):
        ranks = SimpleNamespace(config=config)
        monkeypatch.setattr(pool, "launched", lambda ranks=ranks: ranks)
        planning.note_left(0, size)
        left.append(list(planning._history.left.values()))
    assert left == [[], [0], [0]]
    monkeypatch.setattr(pool, "launched", lambda: None)
    assert any(f"{ASIDE}1: " in line for line in plan_for(auto)[1])
    assert planning.question_of(planning.Asked(auto, MODEL, request))[0].swaps.left_by_comfyui == ((1, 0),)
    assert planning.question_of(planning.Asked(auto, MODEL, too_large))[0].swaps.left_by_comfyui == ((1, 0),)
    smaller = planning.question_of(
        planning.Asked(auto, MODEL, lambda shape: RequestEstimate(32759, 512, 20, 2))
    )[0]
    elsewhere = planning.question_of(planning.Asked(AutoConfig(gpus="2,3"), MODEL, request))[0]
    assert not smaller.swaps.left_by_comfyui and not elsewhere.swaps.left_by_comfyui


def test_comfyuis_gpu_is_the_last_to_be_used(machine, monkeypatch):
    """Where all run, ranks are on the GPUs that degrees by hand use, so that neither starts others anew."""
    planning.note_shared(0)
    monkeypatch.setattr(planning, "choose", lambda *_: SimpleNamespace(plan=chosen, **vars(found)))
    found = SimpleNamespace(lines=["why"], regret={}, option=SimpleNamespace(unit="GPU", swap_seconds=0.0))
    placed = {}
    for gpus in ("", "0,1,2,3"):
        for ranks in (1, 2, GPUS):
            chosen = ParallelConfig(ulysses_degree=ranks)
            placed[gpus, ranks] = plan_for(AutoConfig(gpus=gpus))[0].gpus
    assert placed == {("", 1): "1", ("", 2): "1,2", ("", 4): ""} | {
        ("0,1,2,3", ranks): "" for ranks in (1, 2, 4)
    }


def test_weights_of_gpus_that_have_the_hosts_memory_are_planned_to_be_read_again(machine, monkeypatch):
    swaps = []
    for unified in ((), (0,), (1,)):
        monkeypatch.setattr(measurements, "unified_among", lambda *_, unified=unified: unified)
        swaps.append(planning.question_of(planning.Asked(ALL, MODEL, request))[0].swaps)
    assert [each.must_reread(ParallelConfig(), 1) for each in swaps] == [False, True, False]
    of_two = ParallelConfig(ulysses_degree=2)
    assert swaps[2].must_reread(of_two, 1) and not swaps[2].ordered([0, 2]).must_reread(of_two, 1)
    assert swaps[2].ordered([1, 0]).must_reread(ParallelConfig(), 1)


def test_the_factor_is_of_steps(machine):
    """Not of weights that leave for ComfyUI's models: the notes say what these take, and one GPU has to read
    them from its file here, where two have not."""
    question, _ = planning.question_of(planning.Asked(AutoConfig(gpus="2"), MODEL, request))
    shared = replace(question, swaps=WeightSwaps(host=1, left_by_comfyui=((0, 0),)))
    factors = []
    for each in (question, shared):
        one, two = (each.option(ParallelConfig(ulysses_degree=ranks)) for ranks in (1, 2))
        factors.append(PlanChoice(two, (), one, "auto").lines[0].split(" one GPU")[0])
    assert one.yield_seconds > 0 and factors[0] == factors[1]
    slower = replace(two, seconds=1.1 * (one.seconds - one.yield_seconds), yield_seconds=0.0)
    by_moves = PlanChoice(slower, (), one, "auto").lines[0]
    assert f"about {one.seconds / slower.seconds:.1f}x one GPU" in by_moves


def test_memory_that_others_have_given_back_counts_while_ranks_run(machine, monkeypatch):
    """It was measured before they started, and a larger model was refused until they ended. What they have
    themselves is theirs again; that less is free while they work says nothing."""
    two = AutoConfig(gpus="1,0")
    machine.free = (12 * GB,) * GPUS
    assert planning.question_of(planning.Asked(two, MODEL, request))[0].machine.memory == (12 * GB,) * 2
    run_ranks(monkeypatch, [6 * GB, 5 * GB], is_busy=True)
    monkeypatch.setattr(planning, "LOOK_SECONDS", -1.0)
    for free, expected in ((4, (12, 12)), (20, (26, 25)), (2, (26, 25))):
        machine.free = (free * GB,) * GPUS
        found = planning._free_memory("cuda", [1, 0])
        assert found == tuple(each * GB for each in expected)


def test_a_driver_that_says_nothing_gives_no_memory_back(machine, monkeypatch):
    """What is usual then has the ranks' weights in it already: they were counted twice, beyond the card."""
    machine.free = (12 * GB,) * GPUS
    planning.question_of(planning.Asked(AutoConfig(gpus="1,0"), MODEL, request))
    run_ranks(monkeypatch, [6 * GB] * 2)
    monkeypatch.setattr(planning, "LOOK_SECONDS", -1.0)
    monkeypatch.setattr(measurements, "free_memory", lambda device, indices, unknown: tuple(unknown))
    assert planning._free_memory("cuda", [1, 0]) == (12 * GB,) * 2


def test_memory_that_others_have_taken_is_not_free_while_ranks_run(machine, monkeypatch):
    """Where ranks with degrees of one's own ran first, nothing was measured before them. What ranks cache of
    the last request is theirs; of their CUDA contexts nobody knows."""
    monkeypatch.setattr(measurements, "usual_memory", lambda *_: (23 * GB,) * 2)
    machine.free = (15 * GB, 5 * GB)
    run_ranks(monkeypatch, [2 * GB] * 2, device_bytes=[7 * GB, 2 * GB], gpus="0,1")
    monkeypatch.setattr(planning, "LOOK_SECONDS", 60.0)
    assert planning._free_memory("cuda", [0, 1]) == (23 * GB, 7 * GB + RESERVE)
    machine.free = (3 * GB, 20 * GB)
    assert planning._free_memory("cuda", [0, 1]) == (23 * GB, 7 * GB + RESERVE), "asked a moment ago"
    monkeypatch.setattr(planning, "LOOK_SECONDS", -1.0)
    assert planning._free_memory("cuda", [0, 1]) == (10 * GB + RESERVE, 22 * GB)


def test_a_plan_that_others_leave_no_room_for_is_not_spared_for(machine, monkeypatch):
    """It lacked memory since another program has some: it is looked again how much, and no plan leaves more
    free on every GPU."""
    monkeypatch.setattr(planning, "LOOK_SECONDS", 60.0)
    plan, _ = plan_for()
    run_ranks(monkeypatch, [0] * GPUS, gpus="0,1,2,3")
    planning.question_of(planning.Asked(ALL, MODEL, request))
    machine.free = (32 * GB, 4 * GB, 32 * GB, 32 * GB)
    assert spare_more(plan)
    assert not planning._history.spared
    assert planning._history.free["cuda", 0, 1, 2, 3] == (32 * GB, 4 * GB + RESERVE, 32 * GB, 32 * GB)


def test_what_ranks_have_parked_is_not_missing(machine, monkeypatch):
    """Else the plan after the first parked weights would count on reading them from their file."""
    monkeypatch.setattr(planning, "host_free", lambda swap: 64 * GB)
    before = planning.question_of(planning.Asked(ALL, MODEL, request))[0].swaps.host
    monkeypatch.setattr(pool, "launched", lambda: SimpleNamespace())
    monkeypatch.setattr(planning, "host_free", lambda swap: 20 * GB)
    assert planning.question_of(planning.Asked(ALL, MODEL, request))[0].swaps.host == before == 32 * GB
