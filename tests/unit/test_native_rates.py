"""Native products at the rate that the probe measures, in the planner's seconds."""

import json
from dataclasses import replace
from pathlib import Path

import memory_table
import pytest
import torch
from published import FLUX, L40, RTX4090
from released_forms import checkpoint_of

from backend import probe
from backend.client.auto import measurements, probe_process
from backend.config import ParallelConfig
from backend.loading.weight_loading import matrices
from backend.planner.choose import Question, choose
from backend.planner.cost import Cost
from backend.planner.machine import Machine, RequestEstimate
from backend.probe import Probe
from backend.quantization import matmul, native_trial
from backend.quantization.kernels import AUTO
from backend.rank_plan.shape_of import shape_of

INT8, PLAN, CPU = "int8_tensorwise", ParallelConfig(), torch.device("cpu")
REQUEST = RequestEstimate(4096, 512, 4, 1)
GB = 10**9


@pytest.fixture(scope="module")
def krea():
    """Krea 2 in int8, multiplied natively."""
    pytest.importorskip("comfy_kitchen")
    file = next(file for file in memory_table.FILES if file.model == "Krea 2, int8 ConvRot")
    checkpoint = checkpoint_of(file)
    found = matrices(checkpoint, {}, torch.bfloat16)
    choices = matmul.choose_all("krea", found, AUTO, CPU, None)
    assert any(choice.kernel for choice in choices.values())
    return shape_of(checkpoint, torch.bfloat16, choices)


def test_a_shape_knows_what_multiplies_natively(krea):
    """All matrices of its blocks; a plain file none."""
    assert {block.native_format for block in krea.blocks} == {INT8}
    assert all(0.98 < block.native_share <= 1 for block in krea.blocks)
    assert type(krea).from_dict(krea.as_dict()) == krea
    assert not any(block.native_share for block in FLUX.blocks)
    assert FLUX.blocks[0].slowness({INT8: 2.0}) == 1


def test_seconds_of_products_are_those_of_their_rate(krea):
    """Where products alone count, and no other model's change."""
    bare = replace(L40, attention=1e30, bandwidth=1e30, launch=0.0)

    def seconds(shape, **rates) -> float:
        return Cost(shape, PLAN, replace(bare, native_rates=rates), REQUEST).total

    assert seconds(krea, **{INT8: 2.0}) == pytest.approx(seconds(krea) / 2, rel=0.02)
    assert seconds(krea, **{INT8: 0.5}) == pytest.approx(2 * seconds(krea), rel=0.02)
    assert seconds(krea, nvfp4=4.0) == seconds(krea)
    assert seconds(FLUX, **{INT8: 2.0}) == seconds(FLUX)


def test_links_weigh_more_with_faster_products(krea):
    """Over PCIe a ring of two gains less, here one that is slow against Krea 2's few keys and values."""

    def gain(rate: float) -> float:
        machine = replace(RTX4090, p2p=RTX4090.p2p / 4, memory=(24 * GB,) * 2, native_rates={INT8: rate})
        question = Question(krea, REQUEST, machine, 2)
        one, two = (question.option(ParallelConfig(ring_degree=ranks)).seconds for ranks in (1, 2))
        assert choose(question).option.seconds <= two
        return one / two

    assert gain(2.5) < 0.9 * gain(1.0)


def test_a_machine_keeps_its_rates():
    read = Machine.from_dict({**replace(L40, native_rates={INT8: 1.5}).as_dict()})
    assert read.native_rates == {INT8: 1.5}
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError):
            Machine.from_dict({**L40.as_dict(), "native_rates": {INT8: wrong}})
    with pytest.raises(KeyError):  # of an earlier version: it is measured again
        Machine.from_dict({name: value for name, value in L40.as_dict().items() if name != "native_rates"})


class Alone:
    """In the control channel's place: this rank, and ``others`` that answer so."""

    def __init__(self, *others: dict):
        self.others = others

    def all_gather_object(self, own) -> list:
        return [own, *self.others]


def rank(*others: dict) -> Probe:
    """One of the probe's, which measures small products."""
    found = Probe.__new__(Probe)
    found.kind, found.device, found.dtype = "cpu", CPU, torch.float32
    found.tokens, found.width, found.control = 32, native_trial.SIZE, Alone(*others)
    return found


def test_the_probe_times_what_auto_multiplies_natively():
    """On a CPU int8 alone, of whose two kinds the slower one counts."""
    pytest.importorskip("comfy_kitchen")
    alone, timed = rank(), []

    def seconds(action):
        action()
        timed.append(action)
        return {1: 6.0, 2: 2.0, 3: 3.0}[len(timed)]

    alone.sustained = seconds
    assert alone.natives() == [{INT8: 2.0}] and len(timed) == 3


@pytest.mark.parametrize("why", ["comfy-kitchen is not installed", ""])
def test_what_cannot_run_or_fails_has_no_rate(monkeypatch, why, capfd):
    """The other ranks go on."""

    def fails(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    alone = rank()
    alone.sustained = fails
    refused = {(INT8, "float32"): why} if why else {}
    monkeypatch.setattr(native_trial, "refusals", lambda products, device: refused)
    assert alone.natives() == [{}]
    assert ("device-side assert" in capfd.readouterr().err) == (not why)


@pytest.mark.parametrize("other, wanted", [({INT8: 1.2}, 1.2), ({INT8: 3.0}, 2.0), ({}, None)])
def test_the_slowest_rank_counts(other, wanted):
    """Where one has none, none is counted."""
    one = rank(other)
    one._native_rate = lambda kind, name: 2.0
    machine = L40.with_natives(one.natives())
    assert machine.native_rates == ({} if wanted is None else {INT8: wanted})
    assert machine.natives == ({INT8: 2.0}, other) and Machine.from_dict(machine.as_dict()) == machine


def test_links_stay_measured_where_a_native_product_ends_a_rank(monkeypatch, caplog):
    """Those are the last that are timed; no other way between GPUs is tried for them. What fails before has
    no rates."""
    rates, tries = {"native_rates": {}}, []

    def run(command, *_, **__):
        tries.append(command)
        if len(tries) == 1:
            Path(command[command.index("--out") + 1]).write_text(json.dumps(rates))
        raise probe_process.UnmeasuredError("rank 1 was killed by SIGSEGV", of_links=True)

    monkeypatch.setattr(probe_process, "run", run)
    monkeypatch.setattr(probe_process, "sanitized_environment", lambda *_, **__: {})
    monkeypatch.setattr(probe_process.nccl_settings, "to_try", lambda _: [{}, {"NCCL_P2P_DISABLE": "1"}])
    monkeypatch.setattr(probe_process.nccl_settings, "save_way", lambda *_: None)
    given = (ParallelConfig(ulysses_degree=2), "cuda", lambda: None, print)
    assert probe_process.measured_rates(*given) == {**rates, "links": ""} and len(tries) == 1
    assert "not all of this machine was measured: rank 1 was killed" in caplog.text
    with pytest.raises(probe_process.UnmeasuredError):
        probe_process.measured_rates(*given)
    assert len(tries) == 3  # both ways


def test_another_comfy_kitchen_is_measured_again(monkeypatch):
    keys = []
    for version in ("0.2.40", "0.2.41", ""):
        monkeypatch.setattr(measurements, "installed", lambda _, version=version: version)
        keys.append(str(measurements._machine_key("cpu", [0, 1])))
    assert len(set(keys)) == 3


def test_rates_are_written_whole(tmp_path):
    out = tmp_path / "rates.json"
    for native in ({}, {"int8_tensorwise": 1.5}):
        probe.write(replace(L40, native_rates=native), out)
        assert json.loads(out.read_text())["native_rates"] == native
    assert list(tmp_path.iterdir()) == [out]
