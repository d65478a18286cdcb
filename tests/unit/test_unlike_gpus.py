"""Plans where GPUs are of several generations: a model has other types and kernels on each."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from published import L40, WAN

from backend.client import pool
from backend.client.auto import measurements, planning
from backend.client.auto.model_choice import ModelChoice
from backend.client.auto.plan_history import PlanHistory
from backend.config import ConfigError, ParallelConfig
from backend.planner.auto_config import AutoConfig
from backend.planner.choose import Question
from backend.planner.machine import RequestEstimate

GB = 1_000_000_000
FP8, INT8 = "float8_e4m3fn", "int8_tensorwise"
#: GPU -> compute capability, as of two 3090 and one 4090.
CARDS = {0: (8, 6), 1: (8, 9), 2: (8, 6)}
MODEL, OTHER = ModelChoice("model.safetensors"), ModelChoice("other.safetensors")
REQUEST = RequestEstimate(32760, 512, 20, 1)
ONE, TWO = ParallelConfig(), ParallelConfig(ulysses_degree=2)
NATIVE = ({INT8: 1.5}, {INT8: 2.0, FP8: 2.0}, {INT8: 1.6})
MACHINE = replace(L40, memory=(32 * GB,) * 3, speeds=(1.0, 2.0, 1.0), names=("3090", "4090", "3090"))


def computed_by(capability: tuple[int, int]):
    """WAN as a GPU of a capability computes it: the newer one multiplies fp8."""
    kind = FP8 if capability >= (8, 9) else INT8
    blocks = tuple(replace(block, native_format=kind, native_share=1.0) for block in WAN.blocks)
    return replace(WAN, blocks=blocks)


OLD, NEW = computed_by((8, 6)), computed_by((8, 9))


def test_native_rates_of_the_first_ranks_are_theirs():
    machine = MACHINE.with_natives(NATIVE)
    assert machine.native_rates == {INT8: 1.5}
    moved = machine.ordered(machine.fastest_first())
    assert moved.natives == (NATIVE[1], NATIVE[0], NATIVE[2])
    assert [moved.of_first(ranks).native_rates for ranks in (1, 2, 3)] == [
        NATIVE[1],
        {INT8: 1.5},
        {INT8: 1.5},
    ]
    assert L40.of_first(1) == L40


@pytest.mark.parametrize("others", [(), (OLD,)], ids=["alone", "two experts"])
def test_one_gpu_is_counted_as_it_computes_alone(others):
    """The newer one was timed without the products that it alone has, and sized by the older one's types."""
    machine = MACHINE.ordered([1, 0, 2]).with_natives((NATIVE[1], NATIVE[0], NATIVE[2]))
    wide = replace(OLD, itemsize=4)
    pairs = ((NEW, *(NEW for _ in others)), (wide, *others), (wide, *others))
    question = Question(wide, REQUEST, machine, 3, others=others, shapes=pairs)
    alone = Question(NEW, REQUEST, machine.of_first(1), 1, others=(NEW,) * len(others)).option(ONE)
    both = Question(wide, REQUEST, machine, 2, others=others).option(TWO)
    assert question.option(ONE) == alone and question.option(TWO) == both
    assert alone.seconds < replace(question, shapes=()).option(ONE).seconds
    turns = replace(question, others=()).option(ONE)
    assert turns == Question(NEW, REQUEST, machine.of_first(1), 1).option(ONE)
    found = {each.plan.world_size: each for each in question.options()}
    assert set(found) >= {1, 2} and found[1] == alone


@pytest.fixture
def cards(monkeypatch):
    """Three unlike GPUs; returns the models and devices whose shapes are read, and may make all alike."""
    found = SimpleNamespace(read=[], differ=True, free=[32 * GB] * 3)

    def model_shape(choice, device, devices, *_):
        found.read.append((choice, tuple(devices)))
        return computed_by(measurements.least_capability(device, devices))

    def rates(*_):
        machine = replace(MACHINE, memory=()).with_natives(NATIVE)
        return machine if found.differ else replace(machine, names=("3090",) * 3, speeds=(1.0,) * 3)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(planning, "has_kernels", lambda index: True)
    monkeypatch.setattr(
        measurements, "least_capability", lambda device, devices: min(CARDS[each] for each in devices)
    )
    monkeypatch.setattr(measurements, "model_shape", model_shape)
    monkeypatch.setattr(measurements, "machine_rates", rates)
    monkeypatch.setattr(measurements, "free_memory", lambda device, indices: tuple(found.free))
    monkeypatch.setattr(measurements, "unified_among", lambda *_: ())
    monkeypatch.setattr(measurements, "load_rate", lambda *_: 0.0)
    monkeypatch.setattr(pool, "launched", lambda: None)
    monkeypatch.setattr(planning, "_history", PlanHistory())
    return found


def test_a_shape_is_read_for_each_least_capability_of_the_first_gpus(cards):
    """In the order of the plan, the fastest first; once where all are alike."""
    question, devices = planning.question_of(
        planning.Asked(AutoConfig(), MODEL, lambda shape: REQUEST, (OTHER,))
    )
    assert devices == [1, 0, 2] and question.shapes == ((NEW, NEW), (OLD, OLD), (OLD, OLD))
    assert (question.shape, question.others) == (OLD, (OLD,))
    assert cards.read == [(each, gpus) for gpus in ((0, 1, 2), (1,)) for each in (MODEL, OTHER)]
    assert question.option(ONE).seconds < replace(question, shapes=()).option(ONE).seconds
    cards.read.clear()
    cards.differ = False
    question, _ = planning.question_of(planning.Asked(AutoConfig(), MODEL, lambda shape: REQUEST, (OTHER,)))
    assert not question.shapes and len(cards.read) == 2


def test_a_model_that_fits_no_fast_gpu_runs_on_the_roomiest(cards, monkeypatch):
    """It was said to need more than there is, where it cannot be cut and the fastest has less memory."""
    computed = measurements.model_shape
    monkeypatch.setattr(
        measurements, "model_shape", lambda *given: replace(computed(*given), whole_only="convolutions")
    )
    small = RequestEstimate(1024, 512, 20, 1)
    need = planning.question_of(planning.Asked(AutoConfig(), MODEL, lambda shape: small))[0].option(ONE).bytes
    rooms = {"first": [64 * GB, 80 * GB, 64 * GB], "roomiest": [need, need // 2, need + 2 * GB]}
    chosen = {}
    for name, cards.free in rooms.items():
        plan, _ = planning.plan_for(planning.Asked(AutoConfig(), MODEL, lambda shape: small))
        chosen[name] = (plan.world_size, plan.gpus)
    assert chosen == {"first": (1, "1"), "roomiest": (1, "2")}
    assert planning.spare_more(planning.Asked(AutoConfig(), MODEL, lambda shape: small, ()), plan)
    assert 0 < planning._history.spared[("cuda", 0, 1, 2, MODEL)] < 2 * GB
    cards.free = [need // 2] * 3
    with pytest.raises(ConfigError, match="does not fit"):
        planning.plan_for(planning.Asked(AutoConfig(), MODEL, lambda shape: small))
