"""Weights that stay dequantized through a request: the same bits, made once, in memory that is spare."""

import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_memory import GB, FakeMemory, on_ranks
from loras import write_mixed
from quantized import write_gguf, write_scaled
from tiny import batch_request, shallow_flux, weights_module

from backend.client.rank_environment import sanitized_environment
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.lora_keys import lora_stack
from backend.parallel import mesh
from backend.planner.memory import LEFT_FREE, SPARE, spare_bytes
from backend.quantization import dequantized_cache as cache_module
from backend.quantization.dequantize_once import dequantized_once
from backend.quantization.dequantized_cache import (
    CACHE_VARIABLE,
    may_cache_dequantized,
    stop_caching_dequantized,
)
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight
from backend.rank import admission as admission_module
from backend.rank.admission import Admission, InsufficientMemory, RankMemory
from backend.rank.worker import Worker
from backend.rank_plan.need import Need
from backend.sampling.runs import Prepared
from backend.sampling.step_loop import Callbacks, RequestCancelled

KINDS = ("float8_e4m3fn", "int8_tensorwise", "mxfp8", "nvfp4", "Q4_K")
#: A request of so many steps, all but the first in patches that read stale keys and values.
STEPS, PATCHES = 3, 2
PASSES = 2 * (1 + (STEPS - 1) * PATCHES)  # of two prompts
ALL, QUIET = 1 << 30, Callbacks()


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Also after tests whose ranks ran out of memory."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(cache_module, "_have_run_out", False)


@pytest.fixture(scope="module")
def state():
    return weights_module().state_dict(shallow_flux())


def loaded(folder, state, kind: str) -> Engine:
    """A quantized model in one process that computes patches as a pipeline does."""
    path = folder / (f"{kind}.gguf" if kind == "Q4_K" else f"{kind}.safetensors")
    if kind == "Q4_K":
        pytest.importorskip("gguf")
        write_gguf(path, state, (kind,))
    else:
        write_scaled(path, state, kind)
    engine = Engine(ParallelConfig(num_pipeline_patch=PATCHES), mesh.single())
    engine.load("tiny", str(path), "fp32", "weight only")
    return engine


@pytest.fixture(scope="module")
def engine(folder, state):
    return loaded(folder, state, "int8_tensorwise")


def run(
    engine: Engine,
    spare: int,
    name: str = "tiny",
    steps: int = STEPS,
    callbacks: Callbacks = QUIET,
    solver: str = "euler_ancestral",
    prompts: int = 2,
):
    """The latent and the statistics."""
    sample = batch_request(1)
    tensors = {**sample.tensors, "sigmas": sample.tensors["sigmas"][: steps + 1]}
    if prompts == 1:
        tensors = {key: value for key, value in tensors.items() if not key.startswith("negative")}
    sample = replace(
        sample, model=name, sampler=solver, num_pipeline_patch=PATCHES, warmup_steps=1, tensors=tensors
    )
    prepared = replace(engine.prepare_sample(sample), spare=spare)
    return engine.sample(sample, callbacks, prepared)


def weights(engine: Engine) -> list[PackedWeight]:
    return engine.models["tiny"].dequantized_every_step


@pytest.fixture
def made(monkeypatch) -> Counter:
    """How often a matrix is dequantized, by the address of what is stored."""
    found: Counter[int] = Counter()
    dequantize = Packed.dequantize

    def counted(self, *arguments):
        found[self.tensors["values"].data_ptr()] += 1
        return dequantize(self, *arguments)

    monkeypatch.setattr(Packed, "dequantize", counted)
    return found


def times(made: Counter, engine: Engine) -> list[int]:
    return [made[weight.packed.tensors["values"].data_ptr()] for weight in weights(engine)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_made_once_with_the_same_bits(folder, state, kind, made):
    """Where every pass of both prompts makes it, the first step's and those of each patch of the others; what
    embeds times, each evaluation's."""
    engine = loaded(folder, state, kind)
    wanted, stats = run(engine, spare=0)
    assert stats["dequantized_once"] == 0
    assert set(times(made, engine)) == {2 * STEPS, PASSES}
    others = sum(made.values()) - sum(times(made, engine))
    made.clear()
    found, stats = run(engine, spare=ALL)
    assert found.equal(wanted)
    assert set(times(made, engine)) == {1}
    assert sum(made.values()) - sum(times(made, engine)) == others  # those of cached answers
    taken = sum(weight.shape.numel() * weight.dtype.itemsize for weight in weights(engine))
    assert taken <= stats["dequantized_once"] <= 1.01 * taken
    assert all(weight.buffer is None for weight in weights(engine))


def test_modulation_is_made_once_anyway(engine):
    names = {id(module): name for name, module in engine.models["tiny"].transformer.named_modules()}
    repeated = {names[id(weight)] for weight in weights(engine)}
    assert any("attn.to_q" in name for name in repeated)
    assert not any(".norm" in name or "context_embedder" in name for name in repeated)


def test_as_many_as_there_is_room_for(engine, made):
    """Those of which a value takes most to make; the others are made each time, and no bit changes."""
    wanted, everything = run(engine, spare=0)[0], run(engine, spare=ALL)[1]["dequantized_once"]
    made.clear()
    found, stats = run(engine, spare=everything // 2)
    assert found.equal(wanted)
    assert everything / 3 < stats["dequantized_once"] <= everything // 2
    assert {1, PASSES} <= set(times(made, engine))


def test_what_takes_longest_stays(folder, state, monkeypatch):
    both = loaded(folder, state, "nvfp4"), loaded(folder, state, "float8_e4m3fn")
    slow, fast = (weights(each) for each in both)
    assert slow[0].effort.moved > fast[0].effort.moved
    size = sum(weight.shape.numel() * weight.dtype.itemsize for weight in slow)
    with dequantized_once([*fast, *slow], size + 512 * len(slow)) as taken:
        assert taken >= size
        assert all(weight.buffer is not None for weight in slow)
        assert any(weight.buffer is None for weight in fast)


def test_nothing_stays_after_cancel(engine):
    def stop():
        raise RequestCancelled(1)

    with pytest.raises(RequestCancelled):
        run(engine, ALL, callbacks=Callbacks(on_begin=lambda step: step and stop()))
    assert all(weight.buffer is None for weight in weights(engine))


@pytest.mark.parametrize("solver, prompts, calls", [("euler", 1, 1), ("euler", 2, 2), ("heun", 1, 2)])
def test_of_one_step_they_stay_where_the_model_is_called_again(engine, made, solver, prompts, calls):
    """For the negative prompt, or for a solver that asks twice in a step."""
    wanted, stats = run(engine, spare=0, steps=1, solver=solver, prompts=prompts)
    assert stats["model_calls"] == calls and set(times(made, engine)) == {calls}
    made.clear()
    found, stats = run(engine, spare=ALL, steps=1, solver=solver, prompts=prompts)
    assert found.equal(wanted)
    assert set(times(made, engine)) == {1} and (stats["dequantized_once"] > 0) == (calls > 1)


def test_memory_that_cannot_be_had_is_done_without(engine, monkeypatch):
    """What was counted as spare may be another program's by then."""
    wanted = run(engine, spare=0)[0]
    empty = torch.empty

    def refused(*shape, **options):
        if "device" in options and shape and shape[0] > 100_000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*shape, **options)

    with monkeypatch.context() as patched:
        patched.setattr("backend.quantization.dequantize_once.torch.empty", refused)
        with dequantized_once(weights(engine), ALL) as taken:
            assert taken == 0 and all(weight.buffer is None for weight in weights(engine))
    assert run(engine, spare=ALL)[0].equal(wanted)


def test_loras_are_beside_what_stays(engine, folder):
    """Of the next request other ones, or none."""
    write_mixed(folder / "lora.safetensors", shallow_flux())
    bare = run(engine, spare=0)[0]
    for strength in (0.5, -0.3):
        name = engine.add_lora_stack("tiny", lora_stack([[str(folder / "lora.safetensors"), strength]]))
        wanted = run(engine, spare=0, name=name)[0]
        assert not wanted.equal(bare)
        assert run(engine, spare=ALL, name=name)[0].equal(wanted)
    assert run(engine, spare=ALL)[0].equal(bare)


# ------------------------------------------------------------------ how much is spare
def spare(rooms: list[RankMemory], memories: list[FakeMemory], weights: int = 0) -> list[int]:
    """What each rank of a model of so many bytes may take."""
    report = SimpleNamespace(weight_bytes=weights)
    prepared = Prepared(cast(Any, SimpleNamespace(report=report)), cast(Any, None))

    def act(rank, control, memory):
        return Admission(ParallelConfig(), control, memory)._spare(rooms, prepared)

    return on_ranks(memories, act)[0]


def room(rank: int, memory: str, free: int, likely: int, cached: int = 0) -> RankMemory:
    return RankMemory(rank, memory, Need(0, likely * GB), free * GB, cached * GB)


def test_most_of_what_nobody_needs_is_spare():
    """Of each GPU its own, and what the rank's own allocator has."""
    rooms = [room(0, "a", 12, 2), room(1, "b", 12, 4, cached=6)]
    found = spare(rooms, [FakeMemory(0)] * 2)
    assert found == [SPARE * 10 * GB - LEFT_FREE, SPARE * 14 * GB - LEFT_FREE]
    assert spare([room(0, "a", 2, 3)], [FakeMemory(0)]) == [0]


def test_a_request_that_needs_much_may_need_more():
    """A quarter of what it likely needs stays free for it."""
    assert spare([room(0, "a", 50, 40)], [FakeMemory(0)]) == [0]
    assert spare([room(0, "a", 53, 40)], [FakeMemory(0)]) == [3 * GB]


def test_ranks_of_one_gpu_share_it():
    """What the allocator of one has cached is of no use to the other, which likely needs what is free."""
    both = spare([room(0, "a", 20, 3), room(1, "a", 20, 5)], [FakeMemory(0)] * 2)
    assert both == [spare_bytes(6 * GB, 3 * GB), spare_bytes(5 * GB, 5 * GB)]
    cached = spare([room(0, "a", 2, 1, cached=5), room(1, "a", 2, 1)], [FakeMemory(0)] * 2)
    assert cached[1] == 0


def test_on_the_cpu_neither_swap_nor_the_models_pages_are_spare(monkeypatch):
    monkeypatch.setattr(admission_module, "host_free", lambda swap: 100 * GB if swap else 9 * GB)
    found = spare([room(0, "ram", 100, 1)], [FakeMemory(0, kind="cpu")], weights=4 * GB)
    assert found == [spare_bytes(4 * GB, GB)]


def test_what_is_admitted_knows_what_is_spare():
    ready = Prepared(cast(Any, None), cast(Any, None))

    def act(rank, control, memory):
        admission = Admission(ParallelConfig(), control, memory)
        return admission.prepare(batch_request(1), lambda: ready, frozenset(), None)

    found, _ = on_ranks([FakeMemory(12 * GB, name=name) for name in ("a", "b")], act)
    assert [each.spare for each in found] == [spare_bytes(12 * GB, 0)] * 2


def worker_of(memory: FakeMemory, dequantized: int, sample) -> Worker:
    """One rank whose model lends so much and samples so."""
    worker = Worker.__new__(Worker)
    prepared = Prepared(cast(Any, SimpleNamespace(dequantized_bytes=dequantized)), cast(Any, None), spare=GB)
    worker.engine = cast(Any, SimpleNamespace(memory=memory, sample=sample, prepare_sample=print))
    worker.mesh, worker._admitted = mesh.single(), lambda *_: prepared
    worker.clock = cast(Any, SimpleNamespace(new_request=lambda: None, begin=lambda step: None))
    control = SimpleNamespace(all_gather_object=lambda own: [own], rank=0)
    worker.admission = Admission(ParallelConfig(), cast(Any, control), cast(Any, memory))
    return worker


@pytest.mark.parametrize("dequantized", [0, GB])
def test_after_memory_ran_out_next_to_them_nothing_is_spare(dequantized):
    """One rank goes on, and runs the same request again with all of its memory."""

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker = worker_of(FakeMemory(0), dequantized, fails)
    ready, rooms = Prepared(cast(Any, None), cast(Any, None)), [room(0, "a", 12, 2)]
    assert worker.admission._spare(rooms, ready) > 0
    with pytest.raises(InsufficientMemory):
        worker.run_sample(replace(batch_request(1), shared_ranks=[]), Callbacks())
    assert (worker.admission._spare(rooms, ready) > 0) == (not dequantized)


def test_ranks_after_those_that_ran_out_lend_nothing(monkeypatch):
    """Several ranks end, and their client starts the next ones."""
    assert may_cache_dequantized() and CACHE_VARIABLE not in sanitized_environment(
        dict(os.environ), ParallelConfig(), "cpu"
    )
    stop_caching_dequantized()
    assert (
        not may_cache_dequantized()
        and sanitized_environment(dict(os.environ), ParallelConfig(), "cpu")[CACHE_VARIABLE] == "0"
    )
    assert CACHE_VARIABLE not in os.environ  # with which ComfyUI starts itself again
    control = SimpleNamespace(all_gather_object=lambda own: [own], rank=0)
    admission = Admission(ParallelConfig(), cast(Any, control), cast(Any, FakeMemory(0)))
    ready = Prepared(cast(Any, None), cast(Any, None))
    assert admission._spare([room(0, "a", 12, 2)], ready) == 0


@pytest.mark.parametrize("dequantized, device, released", [(GB, "cuda", 1), (0, "cuda", 0), (GB, "cpu", 0)])
@pytest.mark.parametrize("stops", [False, True])
def test_what_stayed_goes_back_to_other_programs(dequantized, device, released, stops):
    """After a request, also one that was cancelled; where nothing stayed the memory stays the rank's. On a
    CPU what is large goes back by itself."""

    def sample(*_):
        if stops:
            raise RequestCancelled(1)

    worker = worker_of(FakeMemory(0, cached=8 * GB), dequantized, sample)
    worker.mesh = replace(worker.mesh, device=torch.device(device))
    message = replace(batch_request(1), shared_ranks=[])
    if stops:
        with pytest.raises(RequestCancelled):
            worker.run_sample(message, Callbacks())
    else:
        worker.run_sample(message, Callbacks())
    assert worker.engine.memory.released == released
