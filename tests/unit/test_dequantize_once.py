"""Weights that stay dequantized through a request: the same bits, made once, in memory that is spare."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from loras import write_mixed
from quantized import write_gguf, write_scaled
from tiny import batch_request, shallow_flux, weights_module

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.lora.lora_keys import lora_stack
from backend.parallel import mesh
from backend.quantization.dequantize_once import dequantized_once
from backend.quantization.dequantized_cache import pays
from backend.quantization.formats import FORMATS, PLAIN_FLOAT8
from backend.quantization.gguf_blocks import GGUF_EFFORT
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight, free_scratch
from backend.sampling import runs
from backend.sampling.step_loop import Callbacks, RequestCancelled

KINDS = ("float8_e4m3fn", "int8_tensorwise", "mxfp8", "nvfp4", "Q4_K")
#: A request of so many steps, all but the first in patches that read stale keys and values.
STEPS, PATCHES = 3, 2
PASSES = 2 * (1 + (STEPS - 1) * PATCHES)  # of two prompts
ALL, QUIET = 1 << 30, Callbacks()


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
    device: str = "cpu",
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
    rank = replace(engine.mesh, device=torch.device(device))  # which is not where the weights are
    return runs.run_request(rank, prepared, sample, callbacks)


def weights(engine: Engine) -> list[PackedWeight]:
    return engine.models["tiny"].dequantized_every_step


@pytest.fixture(autouse=True)
def own_scratch():
    """Memory that another test has taken in inference mode is not written outside of it."""
    free_scratch()


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


def test_on_gpus_they_stay_where_the_calls_pay_for_it(engine, monkeypatch):
    """There memory goes back after each request, and is mapped anew. Patches are calls, too."""
    efforts = {weight.effort.moved for weight in weights(engine)}
    assert [pays(PASSES, moved, cached=4) for moved in sorted(efforts)] == [False, True]  # of float32
    assert not pays(2, max(efforts), cached=4)
    few = run(engine, ALL, steps=1, device="cuda")[1]
    assert (few["model_calls"], few["dequantized_once"]) == (2, 0)
    wanted, every = run(engine, ALL)
    found, some = run(engine, ALL, device="cuda")
    assert some["model_calls"] == PASSES and found.equal(wanted)
    assert 0 < some["dequantized_once"] < every["dequantized_once"]
    counted = set()
    monkeypatch.setattr(runs, "pays", lambda calls, moved, cached: counted.add(calls))
    assert run(engine, ALL, device="cuda")[1]["dequantized_once"] == 0 and counted == {PASSES}


def test_what_moves_more_pays_earlier():
    """Calls from which each format pays in bf16, on a GPU of 1 TB/s."""
    formats = {"plain": 3.0, "scaled": 7.0, "Q4_K": GGUF_EFFORT["Q4_K"].moved}
    first = {name: next(n for n in range(1, 99) if pays(n, moved, 2)) for name, moved in formats.items()}
    assert first == {"plain": 8, "scaled": 4, "Q4_K": 5}
    assert PLAIN_FLOAT8.effort.moved == formats["plain"] and FORMATS["float8_e4m3fn"].effort.moved == 7.0


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


def test_loras_are_added_to_what_stays(engine, folder):
    """Of the next request other ones, or none."""
    write_mixed(folder / "lora.safetensors", shallow_flux())
    bare = run(engine, spare=0)[0]
    for strength in (0.5, -0.3):
        name = engine.add_lora_stack("tiny", lora_stack([[str(folder / "lora.safetensors"), strength]]))
        wanted = run(engine, spare=0, name=name)[0]
        assert not wanted.equal(bare)
        assert run(engine, spare=ALL, name=name)[0].equal(wanted)
    assert run(engine, spare=ALL)[0].equal(bare)
