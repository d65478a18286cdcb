"""Loads and requests that do not fit are refused on every rank, those that run are not. Memory is made of
numbers: no GPU, no ranks."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from fake_memory import GB, FakeMemory, on_ranks
from families import golden
from headers import opened
from live_memory import LiveMemory
from ranks.flux_requests import FEW, shortened
from tiny import golden_request, write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.protocol import ModelCall
from backend.rank.admission import Admission, InsufficientMemory, RankMemory, short_ranks
from backend.rank_plan import describe
from backend.rank_plan.need import Need
from backend.rank_plan.request_size import RequestSize, size_of
from backend.sampling.model_inputs import run_config
from backend.sampling.runs import Prepared
from backend.sampling.step_loop import Callbacks

BF16 = torch.bfloat16
SIDES = ("positive", "negative")
#: Wan 2.2 A14B at 1280 x 720 and 81 frames, with CFG on eight stages: K/V of 14.4 GB a rank (issue).
WAN = "wan2.2-i2v-A14B"
WAN_SIZE = RequestSize(21 * 45 * 80, 512, batch=1, prompts=2, calls=40)
READY = Prepared(None, None)
FLUX_SIZE = RequestSize(prompts=1)


def room(rank=0, least=1, likely=2, free=10, cached=0, memory="", ready=True) -> RankMemory:
    return RankMemory(rank, memory or f"GPU-{rank}", Need(least, likely), free, cached, ready)


def test_what_is_certain_refuses_and_what_is_likely_only_asks():
    tight = room(least=5, likely=12)
    assert not short_ranks([tight])
    assert not short_ranks([tight], can_make_room=[1])
    assert short_ranks([tight], can_make_room=[0]) == [tight]
    assert short_ranks([room(least=11, likely=12)])


def test_cached_memory_of_the_rank_itself_counts_as_free():
    assert not short_ranks([room(least=12, likely=14, free=10, cached=4)])
    assert room(likely=14, cached=4).wanted == 10


def test_ranks_of_one_memory_share_it():
    """On the CPU: together they need more than there is, though each alone would fit. Uneven ranks fit where
    their sum does."""
    ram = [room(rank, least=6, free=10, memory="ram") for rank in (0, 1)]
    assert len(short_ranks(ram)) == 2
    uneven = [room(0, least=8, free=10, memory="ram"), room(1, least=1, free=10, memory="ram")]
    assert not short_ranks(uneven)


def test_ranks_of_one_memory_have_what_the_last_of_them_found():
    """Each asks at another moment, and others take memory in between."""
    ram = [room(rank, least=6, free=free, memory="ram") for rank, free in ((0, 30), (1, 10))]
    assert len(short_ranks(ram)) == 2


def test_a_rank_that_is_not_ready_stops_all():
    failed = room(1, ready=False)
    assert short_ranks([room(0), failed]) == [failed]


def check(config, checkpoint, memories, size=FLUX_SIZE, can_make_room=(), load=False, dtype=BF16):
    """What each rank's round raises, None where it admits; and the rounds of all."""

    def act(rank, control, memory):
        admission = Admission(config, control, memory)
        planned = None
        if rank == 0 and load:
            planned = admission.plan_load(checkpoint, dtype)
        elif rank == 0:
            planned = admission.plan_request(config, checkpoint, size, dtype)
        admission.check(planned, can_make_room=can_make_room)

    return on_ranks(memories, act)


def gpus(*free: int) -> list[FakeMemory]:
    return [FakeMemory(each * GB, name=f"GPU-{index}") for index, each in enumerate(free)]


@pytest.fixture(scope="module")
def wan():
    return opened(WAN)


@pytest.fixture(scope="module")
def flux():
    return opened("saved__flux1-dev")


def test_the_largest_known_keys_and_values_are_refused_on_all_ranks_with_numbers(wan):
    config = ParallelConfig(pipefusion_degree=8, stale_kv="extrapolate")
    found, ranks = check(config, wan, gpus(80, 80, 80, 12, 80, 80, 80, 80), WAN_SIZE)
    assert all(isinstance(each, InsufficientMemory) for each in found)
    assert all(list(each.lacking) == [3] for each in found)
    text = str(found[0])
    assert text.startswith("rank 3 needs about ") and "12.00 GB are free" in text
    assert float(re.search(r"keys and values ([\d.]+) GB", text)[1]) == pytest.approx(2 * 15.5, rel=0.1)
    assert ranks.rounds == 2  # the names once, and one round


def test_what_would_fit_is_planned(wan):
    """stale_kv reuse halves the buffers; with one patch there are none."""
    config = ParallelConfig(pipefusion_degree=8, stale_kv="extrapolate")
    (first, *_), _ = check(config, wan, gpus(*[30] * 8), WAN_SIZE)
    assert "fit with pipefusion_degree 8 with stale_kv reuse, or pipefusion_degree 8 w" in str(first)
    (first, *_), _ = check(config, wan, gpus(*[18] * 8), WAN_SIZE)
    assert "fit with pipefusion_degree 8 with num_pipeline_patch 1 with stale_kv reuse" in str(first)
    (first, *_), _ = check(replace(config, stale_kv="reuse"), wan, gpus(*[1] * 8), WAN_SIZE)
    assert "No single setting" in str(first)


def test_every_remedy_that_is_named_is_admitted(flux):
    """A load of bf16 Flux on two cards of 16 GB: each remedy, tried by itself, fits."""
    (first, _), _ = check(ParallelConfig(ulysses_degree=2), flux, gpus(16, 16), load=True)
    text = str(first)
    assert text.startswith("rank 0 needs about 23.8") and "to load this model" in text
    named = text.partition("It would fit with ")[2].rstrip(".").split(", or ")
    assert named == [
        "ulysses_degree 2 with shard_weights on",
        "ulysses_degree 1 with tensor_parallel_degree 2",
        "an 8-bit file",
    ]
    for fields in (
        {"ulysses_degree": 2, "shard_weights": True},
        {"tensor_parallel_degree": 2},
    ):
        found, _ = check(ParallelConfig(**fields), flux, gpus(16, 16), load=True)
        assert found == [None, None]


def test_a_quantized_file_is_named_for_one_rank(flux):
    (only,), _ = check(ParallelConfig(), flux, gpus(16), load=True)
    assert "It would fit with an 8-bit file, or a 4-bit file." in str(only)


def test_a_quantized_file_is_about_the_size_of_the_real_one(flux):
    size = RequestSize(prompts=1)
    real = describe(ParallelConfig(), opened("var__flux1-dev-fp8-e4m3fn__Kijai_"), size, BF16)[0].weight_bytes
    derived = describe(ParallelConfig(), flux, size, BF16, bits=8)[0].weight_bytes
    assert derived == pytest.approx(real, rel=0.02)


#: Released files on cards on which docs/memory.md says that they run: (file, degrees, cards in GB, size).
RUN = [
    ("saved__flux1-dev", {"pipefusion_degree": 2}, 24, FLUX_SIZE),
    ("saved__flux1-dev", {"tensor_parallel_degree": 2}, 16, FLUX_SIZE),
    ("saved__flux1-dev", {"ulysses_degree": 2, "shard_weights": True}, 16, FLUX_SIZE),
    ("var__flux1-dev-fp8-e4m3fn__Kijai_", {"ulysses_degree": 2}, 16, FLUX_SIZE),
    ("flux2-dev", {"pipefusion_degree": 4}, 24, FLUX_SIZE),
    ("saved__qwen-image", {"pipefusion_degree": 2}, 24, FLUX_SIZE),
    (WAN, {"pipefusion_degree": 4}, 24, RequestSize(21 * 30 * 52, 512, 1, 1, 8)),
    (WAN, {"pipefusion_degree": 8}, 48, WAN_SIZE),
]


@pytest.mark.parametrize("name, degrees, card, size", RUN, ids=str)
def test_released_files_that_fit_are_admitted(name, degrees, card, size):
    """Each first loads on empty cards, then samples next to its weights, with 1.5 GB taken by CUDA."""
    config = ParallelConfig(**degrees)
    checkpoint = opened(name)
    free = [int((card - 1.5) * GB)] * config.world_size
    loads, _ = check(config, checkpoint, [FakeMemory(f, name=str(i)) for i, f in enumerate(free)], load=True)
    assert loads == [None] * config.world_size
    plans = describe(config, checkpoint, size, BF16)
    left = [FakeMemory(f - plan.weight_bytes, name=str(plan.rank)) for f, plan in zip(free, plans)]
    samples, _ = check(config, checkpoint, left, size)
    assert samples == [None] * config.world_size


@pytest.mark.parametrize("family", ["flux-dev", "wan21-t2v", "sd3", "ltx2", "minimax-h3", "sana"])
def test_tiny_models_are_admitted_with_what_they_hold(tmp_path, family):
    """The least that is certain is less than what the tiny model's own request allocates (LiveMemory)."""
    path = str(write_checkpoint(tmp_path / "tiny.safetensors", family))
    engine = Engine(ParallelConfig(), mesh.single())
    pristine = engine.check_load(path, "default").checkpoint
    engine.load("tiny", path, "default")
    sample = (
        golden(f"{family}__euler_simple")[0] if family != "flux-dev" else golden_request("euler_simple")[0]
    )
    sample = shortened(replace(sample, model="tiny"), FEW)
    model = engine.models["tiny"]
    memory = LiveMemory()
    with memory:
        engine.sample(sample, Callbacks())
    size = size_of(sample, engine.config, model.checkpoint)
    config = run_config(sample, engine.config)
    found, _ = check(config, pristine, [FakeMemory(memory.peak, kind="cpu")], size, dtype=model.dtype)
    assert found == [None]


def test_a_refusal_names_no_patches_that_were_chosen_for_the_request(flux):
    """The backend's own configuration leaves them open."""
    own = ParallelConfig(pipefusion_degree=2)
    asked = replace(own, num_pipeline_patch=3)

    def act(owner, rank, control, memory):
        admission = Admission(owner, control, memory)
        admission.check(admission.plan_request(asked, flux, FLUX_SIZE, BF16) if rank == 0 else None)

    texts = [str(on_ranks(gpus(1, 1), partial(act, owner))[0][0]) for owner in (own, asked)]
    assert ["num_pipeline_patch 3" in text for text in texts] == [False, True], texts
    assert all("It would fit with " in text for text in texts)


def test_memory_that_runs_out_before_the_first_collective_is_said_in_the_round(flux):
    """On rank 1, while it makes the request's tensors: no rank begins, and both are left."""
    sample, _ = golden_request("euler_simple")

    def prepare(rank):
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return "prepared"

    def act(rank, control, memory):
        admission = Admission(ParallelConfig(ulysses_degree=2), control, memory)
        planned = admission.plan_request(admission.config, flux, FLUX_SIZE, BF16) if rank == 0 else None
        return admission.prepare(sample, partial(prepare, rank), False, planned)

    memories = gpus(80, 80)
    found, _ = on_ranks(memories, act)
    assert all(isinstance(each, InsufficientMemory) and "rank 1" in str(each) for each in found)
    assert memories[1].released == 1


def test_loras_for_which_there_is_no_room_are_told_and_asked_for(flux):
    """Rank 1 runs out of memory while it adds 3 GB of them: a client makes room for that too."""
    sample = replace(golden_request("euler_simple")[0], can_make_room=[1])

    def prepare(rank):
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 0.02 GiB")
        return "prepared"

    def act(loras, rank, control, memory):
        admission = Admission(ParallelConfig(ulysses_degree=2), control, memory)
        planned = admission.plan_request(admission.config, flux, FLUX_SIZE, BF16) if rank == 0 else None
        return admission.prepare(sample, partial(prepare, rank), False, planned, lambda: loras)

    wanted = []
    for loras in (0, 3 * GB):
        found, _ = on_ranks(gpus(80, 80), partial(act, loras))
        wanted.append(found[0].lacking[1])
        assert all(("LoRAs next to quantized weights 3.00 GB" in str(each)) == bool(loras) for each in found)
    assert wanted[1] - wanted[0] == 3 * GB


def test_a_call_like_the_one_before_needs_no_round(flux):
    """Unless the client asks, as at the start of a sampling; another size is looked at."""
    call = ModelCall("m", tensors={"x": torch.zeros(1, 16, 8, 8), "time": torch.zeros(1)})
    larger = replace(call, tensors={**call.tensors, "x": torch.zeros(1, 16, 16, 8)})

    def act(messages, rank, control, memory):
        admission = Admission(ParallelConfig(ulysses_degree=2), control, memory)
        planned = admission.plan_request(admission.config, flux, FLUX_SIZE, BF16) if rank == 0 else None
        return [admission.prepare(message, lambda: READY, False, planned) for message in messages]

    def rounds(*messages) -> int:
        found, ranks = on_ranks(gpus(80, 80), partial(act, messages))
        assert all(isinstance(each, Prepared) for of_rank in found for each in of_rank)
        return ranks.rounds - 1  # the names

    assert rounds(call) == rounds(call, call, call) == 1
    assert rounds(call, larger, larger) == rounds(call, call, replace(call, can_make_room=[0])) == 2
    sample, _ = golden_request("euler_simple")
    assert rounds(sample, sample) == 2


def test_who_can_make_no_room_is_told_what_would_fit(wan):
    """Rank 3 lacks memory, and the client shares rank 0's device only."""
    config = ParallelConfig(pipefusion_degree=8, stale_kv="extrapolate")
    memories = gpus(80, 80, 80, 30, 80, 80, 80, 80)
    (first, *_), _ = check(config, wan, memories, WAN_SIZE, can_make_room=[0])
    assert "It would fit with pipefusion_degree 8 with stale_kv reuse" in str(first)
    (first, *_), _ = check(config, wan, memories, WAN_SIZE, can_make_room=[0, 3])
    assert "It would fit" not in str(first) and list(first.lacking) == [3]


def test_parked_weights_count(flux):
    """A request that fits next to its weights, not together with them, or with LoRAs that come with them; on
    the ranks alone whose weights are parked."""
    sample, _ = golden_request("euler_simple")

    def act(free, parked, loras=0):
        def prepare(rank, control, memory):
            admission = Admission(ParallelConfig(ulysses_degree=len(free)), control, memory)
            planned = admission.plan_request(admission.config, flux, FLUX_SIZE, BF16)
            return admission.prepare(sample, lambda: READY, parked, planned, lambda: loras) and "prepared"

        found, _ = on_ranks(gpus(*free), prepare)
        assert len(set(map(str, found))) == 1  # what all ranks say
        return found[0]

    assert act([10], {}) == act([40], {0}) == act([10, 40], {1}) == "prepared"
    for refused in (act([10], {0}), act([40], {0}, 30 * GB), act([40, 10], {1}), act([10, 40], {0, 1})):
        assert isinstance(refused, InsufficientMemory) and "weights 2" in str(refused)
