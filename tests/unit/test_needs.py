"""What rank 0 counts before a round: needs, sizes of calls, settings that may need less. Headers alone."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_memory import GB, FakeMemory
from headers import opened

from backend.config import ParallelConfig
from backend.planner.machine import TOKENS_AT_ONCE, RequestEstimate
from backend.planner.memory import held
from backend.protocol import ModelCall, Sample
from backend.quantization import kernels
from backend.quantization.kernels import MatmulChoice
from backend.rank import admission as admissions
from backend.rank.admission import Admission, InsufficientMemory
from backend.rank_plan import describe
from backend.rank_plan.need import Need, load_need
from backend.rank_plan.remedies import remedies
from backend.rank_plan.request_size import RequestSize, size_of
from backend.rank_plan.shape_of import shape_of
from backend.sampling.model_inputs import run_config
from backend.sampling.runs import Prepared

BF16 = torch.bfloat16
SIZE = RequestSize(prompts=1)
QUANTIZED = "var__flux1-dev-fp8-e4m3fn__Kijai_"


@pytest.fixture(scope="module")
def flux():
    return opened("saved__flux1-dev")


class Alone:
    """In the control channel's place: there is no other rank."""

    rank = 0

    def __init__(self):
        self.rounds = 0

    def all_gather_object(self, value):
        self.rounds += 1
        return [value]

    all_gather_numbers = all_gather_object


def admission(memory: FakeMemory) -> Admission:
    return Admission(ParallelConfig(), Alone(), memory)


def test_plans_are_cached_by_checkpoint_and_request(flux, monkeypatch):
    """Two files with two sizes each, as two experts with and without a negative prompt."""
    made: Counter[RequestSize] = Counter()

    def counted(config, checkpoint, size, *given):
        made[size] += 1
        return describe(config, checkpoint, size, *given)

    monkeypatch.setattr(admissions, "describe", counted)
    own = admission(FakeMemory(80 * GB))
    larger, other = replace(SIZE, image_tokens=16384), opened("flux2-dev")

    def needs() -> list[list[Need]]:
        asked = [(file, size) for file in (flux, other) for size in (SIZE, larger)]
        return [own.plan_request(own.config, file, size, BF16).needs for file, size in asked]

    first = needs()
    assert len({need for [need] in first}) == 4 and made.total() == 4
    assert needs() == first and made.total() == 4
    own.forget()
    assert needs() == first and made.total() == 8


def test_a_request_is_planned_with_the_products_that_were_chosen(monkeypatch):
    """Native ones hold no dequantized weight, but their inputs quantized, and more where no kernel of one
    piece quantizes; ComfyUI would be asked for room that nobody needs, or too little."""
    quantized = opened(QUANTIZED)
    own = admission(FakeMemory(80 * GB))
    names = [name for name in quantized.parameters if name.endswith("weight")]
    native = dict.fromkeys(names, MatmulChoice(kernels.float8, "asked for"))

    def scratch(choices) -> int:
        own.forget()
        [plan] = own.plan_request(own.config, quantized, SIZE, BF16, choices).plans
        return plan.scratch_bytes

    monkeypatch.setattr(kernels, "_fuses", lambda name: True)
    tokens, widest = SIZE.tokens, 15360
    assert scratch(native) == tokens * widest < scratch(None) == scratch({})
    monkeypatch.setattr(kernels, "_fuses", lambda name: False)
    monkeypatch.setattr(kernels, "_may_fuse", lambda: False)
    assert scratch(native) == tokens * widest + kernels.BYTES_PER_FLOAT8_VALUE * kernels.CHUNK


def test_auto_counts_what_ranks_hold_that_compare_inputs(monkeypatch):
    """Of native products whose columns tensor parallelism cuts: 168 MB of int8."""
    monkeypatch.setattr(kernels, "_may_fuse", lambda: True)
    quantized = opened("var__flux2-klein-9b_int8_convrot")
    weights = [name for name in quantized.parameters if name.endswith("weight")]
    native = dict.fromkeys(weights, MatmulChoice(kernels.int8, "asked for"))
    shape = shape_of(quantized, BF16, native)
    request = RequestEstimate(SIZE.image_tokens, SIZE.text_tokens, 20, 1)
    for ranks, most in ((1, SIZE.tokens * 16384), (2, 5 * kernels.COMPARED)):
        config = ParallelConfig(tensor_parallel_degree=ranks)
        counted = {plan.scratch_bytes for plan in describe(config, quantized, SIZE, BF16, native)}
        planned = held(shape, config, request)
        assert counted == {planned.transient - planned.activations} == {most}


def test_a_call_is_looked_at_again_after_a_load(flux):
    """The load has taken memory since."""
    call = ModelCall("m", tensors={"x": torch.zeros(1, 16, 8, 8), "time": torch.zeros(1)})
    own = admission(FakeMemory(80 * GB))
    load, request = own.plan_load(flux, BF16), own.plan_request(own.config, flux, SIZE, BF16)
    rounds = []
    for loads in (0, 0, 1):
        for _ in range(loads):
            own.check(load)
        own.prepare(call, lambda: Prepared(None, None), [], request)
        rounds.append(own.control.rounds - 1)  # without the names
    assert rounds == [1, 1, 3]


def test_weights_that_stay_in_the_file_are_no_least_need():
    """On the CPU, where the system takes their pages back as it likes."""
    plan = SimpleNamespace(weight_bytes=10, scratch_bytes=3)
    assert load_need(plan, "cpu", mapped=True) == Need(0, 13)
    assert load_need(plan, "cpu", mapped=False) == Need(10, 13)
    assert load_need(plan, "cuda", mapped=True) == Need(10, 13)


@pytest.mark.parametrize(
    "kind, is_unified, stays", [("cuda", False, False), ("cuda", True, True), ("cpu", False, True)]
)
def test_offloaded_modulation_counts_where_host_memory_is_the_devices(flux, kind, is_unified, stays):
    """It lies there all the same: a load needs as much with offload_modulation as without."""
    memory = FakeMemory(80 * GB, kind=kind, is_unified=is_unified)
    needs = []
    for offload in (False, True):
        own = Admission(ParallelConfig(offload_modulation=offload), Alone(), memory)
        needs.append(own.plan_load(flux, torch.float32).needs[0])
    (plan,) = describe(ParallelConfig(offload_modulation=True), flux, RequestSize(), torch.float32)
    assert plan.host_bytes > 0
    assert (
        needs[0].least - needs[1].least
        == needs[0].likely - needs[1].likely
        == (0 if stays else plan.host_bytes)
    )


def test_unified_memory_is_not_said_to_fit_by_offloading(flux):
    """Nor a setting next to it, without what it leaves there: here all of the modulation."""
    offloading = ParallelConfig(offload_modulation=True)
    (plan,) = describe(offloading, flux, RequestSize(), BF16)
    free = plan.weight_bytes + 5 * GB  # enough for a request, were modulation elsewhere
    said = []
    for is_unified in (False, True):
        own = Admission(replace(offloading, device="cuda"), Alone(), FakeMemory(free, is_unified=is_unified))
        planned = own.plan_load(flux, BF16)
        try:
            own.check(planned)
            said.append("")
        except InsufficientMemory as error:
            said.append(str(error))
    assert said[0] == "" and "It would fit with an 8-bit file" in said[1]


@pytest.mark.parametrize(
    "name, kind, dtype, fits",
    [
        ("saved__flux1-dev", "cpu", BF16, True),
        ("saved__flux1-dev", "cpu", torch.float32, False),
        (QUANTIZED, "cpu", torch.float32, True),
        ("saved__flux1-dev", "cuda", BF16, False),
    ],
    ids=["as in the file", "cast", "quantized", "on a GPU"],
)
def test_a_load_onto_the_cpu_needs_memory_for_what_is_cast(name, kind, dtype, fits):
    own = admission(FakeMemory(GB, kind=kind))
    planned = own.plan_load(opened(name), dtype)
    if fits:
        assert own.check(planned)[0].need.least == 0
    else:
        with pytest.raises(InsufficientMemory, match="to load this model"):
            own.check(planned)


def test_a_call_reads_nothing_stale():
    """Its stages have the whole sequence, whatever patches samples are cut into."""
    pipeline = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=4)
    planned = run_config(ModelCall("m", tensors={}), pipeline)
    assert planned.patches == 1 and planned == replace(pipeline, num_pipeline_patch=1)
    sample = Sample("m", "euler", 1.0, 7, num_pipeline_patch=8)
    assert run_config(sample, pipeline).patches == 8


@pytest.mark.parametrize(
    "degrees, batch, prompts",
    [
        ({}, 6, 1),
        ({"data_parallel_degree": 4}, 8, 1),
        ({"cfg_degree": 2}, 3, 2),
        ({"cfg_degree": 2, "data_parallel_degree": 2}, 4, 2),
    ],
    ids=str,
)
def test_a_call_is_as_large_as_what_a_replica_computes_at_once(flux, degrees, batch, prompts):
    """Six samples, over data-parallel ranks and both CFG branches; ``batch`` is of all of the former."""
    call = ModelCall("m", tensors=tensors(6, 64))
    size = size_of(call, ParallelConfig(**degrees), flux)
    assert size == RequestSize(32 * 32, 12, batch, prompts, calls=1, image_features=0, drained=True)


def tensors(batch: int, side: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.empty(batch, 16, side, side, device="meta"),
        "cond.c_crossattn": torch.empty(1, 12, 4096, device="meta"),
    }


def test_channels_joined_to_the_latent_of_a_call_count_as_an_argument(flux):
    """As where the call is checked and run: a family may count tokens by them."""

    def joined(config, grid, cond) -> int:
        return cond["c_concat"].shape[1]

    family = flux.family.changed({"conditioning.context_tokens": joined})
    x = torch.empty(1, 16 + 20, 64, 64, device="meta")
    call = ModelCall("m", tensors=tensors(1, 64) | {"x": x})
    assert size_of(call, ParallelConfig(), replace(flux, family=family)).image_tokens == 32 * 32 + 20


def test_references_of_a_call_count_and_leave_room_for_fewer_samples(flux):
    """Two of 48 x 96 tokens next to a latent of 64 x 64."""
    references = {f"cond.ref_latents.{i}": torch.empty(1, 16, 96, 192, device="meta") for i in (0, 1)}
    plain, edit = (
        size_of(ModelCall("m", tensors=tensors(8, 128) | more), ParallelConfig(), flux)
        for more in ({}, references)
    )
    tokens = 64 * 64
    assert (plain.image_tokens, edit.image_tokens) == (tokens, tokens + 2 * 48 * 96)
    assert (plain.batch, edit.batch) == (TOKENS_AT_ONCE // tokens, 1) and plain.batch == 4


def texts(config=None, size=SIZE, quantized=False, own=None) -> list[str]:
    return [remedy.text for remedy in remedies(config or ParallelConfig(), size, quantized, own=own)]


def test_a_file_that_is_quantized_is_not_told_to_be_quantized():
    files = {"an 8-bit file", "a 4-bit file"}
    assert files <= set(texts()) and not files & set(texts(quantized=True))
    assert len(texts()) == len(texts(quantized=True)) + len(files)


def test_what_is_offloaded_into_the_gpus_own_memory_is_no_remedy():
    parked = [remedy.text for remedy in remedies(ParallelConfig(), SIZE, False, parks=False)]
    assert [text for text in texts() if text not in parked] == ["offload_modulation on"]


def test_patches_that_were_chosen_for_the_request_are_named_where_they_change():
    """The user has left them open on these ranks; auto has chosen them with the degrees."""
    two = ParallelConfig(pipefusion_degree=2)
    chosen = replace(two, num_pipeline_patch=3)
    offloading = "pipefusion_degree 2 with num_pipeline_patch 3 with offload_modulation on"
    assert offloading in texts(chosen) and offloading in texts(chosen, own=chosen)
    left_open = texts(chosen, own=two)
    assert "pipefusion_degree 2 with offload_modulation on" in left_open
    assert "pipefusion_degree 2 with num_pipeline_patch 1" in left_open
    assert not any("num_pipeline_patch 3" in text for text in left_open)


def test_a_smaller_batch_is_a_remedy_where_every_replica_has_several_samples():
    """The smallest one that leaves no replica without work, with everything else as it is."""
    replicas = ParallelConfig(data_parallel_degree=2)
    assert not [text for text in texts() + texts(replicas, replace(SIZE, batch=2)) if "batch" in text]
    assert texts(size=replace(SIZE, batch=3))[-1] == "a batch of 1"
    last = list(remedies(replicas, replace(SIZE, batch=3), quantized=False))[-1]
    assert last.text == "a batch of 2" and last.size == replace(SIZE, batch=2) and last.config == replicas
