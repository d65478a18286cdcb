"""Parked weights leave the device whole, and come back to the last bit. Host memory is the device here, and
another place in it is the host's: no GPU."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_memory import GB, FakeMemory
from quantized import write_gguf, write_scaled
from tiny import BLOCKS, golden_request, save_whole, shallow_flux, weights_module

from backend.admission import OutOfRoom, ran_out
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading import parking
from backend.parallel import mesh
from backend.protocol import Sample, Unload
from backend.rank import Worker
from backend.sampling.step_loop import Callbacks
from backend.serving.step_times import StepClock


def copied(modules, *_, **__):
    """In the place of parking.to_host and to_device: every tensor in other memory."""
    for module in modules:
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.clone())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parked")
    state = weights_module().state_dict(shallow_flux())
    plain = save_whole(state, folder / "plain.safetensors")
    write_gguf(folder / "all.gguf", state, ("Q8_0", "Q4_K"))
    scaled = write_scaled(folder / "fp8.safetensors", state, "float8_e4m3fn")
    return {"plain": plain, "gguf": folder / "all.gguf", "fp8": scaled}


@pytest.mark.parametrize("config", [{}, {"offload_modulation": True}], ids=str)
@pytest.mark.parametrize("kind", ["plain", "gguf", "fp8"])
def test_nothing_else_holds_the_memory_and_the_latent_is_the_same(files, kind, config, monkeypatch):
    monkeypatch.setattr(parking, "to_host", copied)
    monkeypatch.setattr(parking, "to_device", copied)
    engine = Engine(ParallelConfig(**config), mesh.single())
    engine.load("tiny", str(files[kind]), "bf16")
    sample = replace(golden_request("euler_simple")[0], model="tiny")
    before, _ = engine.sample(sample, Callbacks())
    model = engine.models["tiny"]
    storages = [p.untyped_storage() for module in model.modules for p in module.parameters()]
    # what is mapped from the file is in no device's memory
    old = [weakref.ref(each) for each in storages if each.nbytes() != files[kind].stat().st_size]
    del storages
    engine.park(model)
    assert old and model.parked and not [storage for storage in old if storage() is not None]
    after, _ = engine.sample(sample, Callbacks())
    assert not model.parked and after.equal(before)


class Recorder:
    """In the place of other ranks: each gives what is here, ``others`` what they answer."""

    def __init__(self, *others):
        self.others = list(others)

    def all_gather_object(self, value):
        return [value, *self.others]


@pytest.mark.parametrize("other_has_room", [True, False])
def test_all_ranks_park_or_none_does(monkeypatch, other_has_room):
    """The others' host memory may be another machine's."""
    calls = []
    model = SimpleNamespace(can_park=True, parked=False, report=SimpleNamespace(weight_bytes=GB))
    engine = SimpleNamespace(
        models={"m": model},
        park=lambda model: calls.append("park"),
        unload=lambda name: calls.append("unload"),
    )
    monkeypatch.setattr(parking, "host_free", lambda swap: 3 * GB)
    rank = Worker.__new__(Worker)
    rank.engine = engine
    rank.dispatcher = Recorder(other_has_room)
    rank.reports = {}
    rank.admission = SimpleNamespace(forget=lambda: None)
    rank.unload(Unload("m", park=True))
    rank.unload(Unload("m"))
    assert calls == ["park" if other_has_room else "unload", "unload"]


def test_parked_weights_take_half_of_the_free_host_memory_at_most(monkeypatch):
    assert parking.has_room(GB, free=2 * GB) and not parking.has_room(GB + 1, free=2 * GB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert not parking.has_room(GB, free=7 * GB) and parking.has_room(GB, free=8 * GB)


def test_weights_on_the_cpu_are_not_parked(files):
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(files["plain"]), "bf16")
    assert not engine.models["tiny"].can_park


def worker(ranks: int) -> Worker:
    """One rank of ``ranks``, with made-up memory, whose requests run out of memory."""

    def sample(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    rank = Worker.__new__(Worker)
    rank.mesh = SimpleNamespace(rank=0, world_size=ranks)
    memory = FakeMemory(GB, GB)
    rank.engine = SimpleNamespace(memory=memory, sample=sample, models={}, stacks={}, prepare_sample=print)
    rank.admission = SimpleNamespace(prepare=lambda *_: None)
    rank.engine.models["m"] = SimpleNamespace(parked=False)
    rank.clock = StepClock(None)
    return rank


def test_memory_that_runs_out_in_between_is_said_with_numbers():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    alone = ran_out(0, 1, FakeMemory(GB, GB), error)
    among = ran_out(1, 2, FakeMemory(GB), error)
    assert isinstance(alone, OutOfRoom) and not isinstance(among, OutOfRoom)
    assert "rank 0 ran out of memory" in str(alone) and "2.00 GB free" in str(alone)
    assert "rank 1 ran out of memory" in str(among) and "Tried to allocate 2.00 GiB" in str(among)


@pytest.mark.parametrize("ranks, error", [(1, "OutOfRoom"), (2, "OutOfMemory")])
def test_memory_that_runs_out_ends_a_rank_only_where_another_waits(ranks, error):
    rank = worker(ranks)
    with pytest.raises(Exception, match="rank 0 ran out of memory .* 2.00 GB free") as raised:
        rank.run_sample(Sample("m", "euler", 1.0, 7), Callbacks())
    assert type(raised.value).__name__ == error and rank.engine.memory.released == 1


@pytest.mark.parametrize("parked", [True, False])
def test_a_refused_request_leaves_all_ranks_parked_or_none(parked):
    """One had no room for its weights, others have theirs back: they must enter the next rounds alike."""
    rank, parks = worker(2), []

    def refuse(message, prepare, was_parked, planned, lacks):
        assert was_parked == parked and lacks() == (GB if parked else 0)
        model.parked = False
        raise OutOfRoom("rank 1 lacks memory", {1: GB})

    held = SimpleNamespace(stack=())
    model = SimpleNamespace(parked=parked, weights=held, lora_bytes=lambda stack: GB)
    rank.engine.models["m"], rank.engine.park = model, parks.append
    rank.admission.prepare = refuse
    with pytest.raises(OutOfRoom):
        rank.run_sample(Sample("m", "euler", 1.0, 7), Callbacks())
    assert parks == ([model] if parked else [])


def test_weights_that_came_back_in_part_are_parked_whole(files, monkeypatch):
    """The meta device is the host here."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(files["plain"]), "bf16")
    model = engine.models["tiny"]

    def to_host(modules, pinned):
        for module in modules:
            module.to("meta")

    def runs_out(modules, device, but):
        model.transformer.x_embedder.to_empty(device=device)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(parking, "to_host", to_host)
    monkeypatch.setattr(parking, "to_device", runs_out)
    engine.park(model)
    with pytest.raises(torch.OutOfMemoryError):
        engine.ready("tiny")
    assert not model.transformer.x_embedder.weight.is_meta
    engine.park(model)
    assert model.parked and all(parameter.is_meta for parameter in model.transformer.parameters())


@pytest.mark.parametrize("shared, released", [([0], 1), ([1], 0), ([], 0)])
def test_cached_memory_goes_back_after_a_request_on_shared_devices(shared, released):
    rank = worker(1)
    rank.engine.sample = lambda *_: ("samples", {})
    assert rank.run_sample(Sample("m", "euler", 1.0, 7, shared=shared), Callbacks()) == ("samples", {})
    assert rank.engine.memory.released == released


def test_host_memory_is_in_few_pieces(monkeypatch):
    """Tensors of any layout keep it, and none overlaps another. What a larger one leaves of its piece, which
    is a power of two as torch makes it anyway, others fill."""
    monkeypatch.setattr(parking, "PIECE", 4096)
    shapes = [(3, 5), (7,), (), (0, 4), (40, 40), (16, 16), (2, 3, 4), (16, 24)]
    tensors = [torch.randn(shape) for shape in shapes]
    tensors += [torch.randn(6, 4).t(), torch.randn(5, 3).to(torch.bfloat16)]
    memory = parking.HostMemory(pinned=False)
    copies = [memory.like(tensor).copy_(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.equal(tensor) and copy.stride() == tensor.stride() and copy.dtype == tensor.dtype
        assert copy.data_ptr() % 16 == 0
    assert [len(piece) for piece in memory.pieces] == [4096, 8192]
    for copy in copies:
        copy.add_(1)
    assert all(copy.equal(tensor + 1) for copy, tensor in zip(copies, tensors, strict=True))


def test_memory_that_cannot_be_page_locked_is_not(monkeypatch, capsys):
    """As on WSL 2: the ranks go on, and say so once."""
    made, empty = [], torch.empty

    def limited(*sizes, pin_memory=False, **settings):
        made.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*sizes, **settings)

    monkeypatch.setattr(parking, "PIECE", 4096)
    monkeypatch.setattr(torch, "empty", limited)
    memory = parking.HostMemory(pinned=True)
    tensors = [torch.randn(40, 20), torch.randn(40, 20)]
    assert all(memory.like(each).copy_(each).equal(each) for each in tensors)
    assert made == [True, False, False]
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "page locked (CUDA error: out of memory)" in told


def test_swap_is_no_room_for_parked_weights(monkeypatch):
    asked = []
    monkeypatch.setattr(parking, "host_free", lambda swap=True: asked.append(swap) or 2 * GB)
    assert parking.has_room(GB) and asked == [False]


def test_offloaded_modulation_stays_where_it_is():
    """The meta device is the GPU here."""
    model = torch.nn.ModuleDict({"block": torch.nn.Linear(2, 2), "modulation": torch.nn.Linear(2, 2)})
    parking.to_device([model], torch.device("meta"), [model["modulation"]])
    assert model["block"].weight.is_meta and not model["modulation"].weight.is_meta


def test_a_load_offloads_each_block_before_the_next(files, monkeypatch):
    """All modulation at once would need the memory that offloading saves."""
    events = []
    monkeypatch.setattr(parking, "to_host", lambda modules, pinned: events.append(len(list(modules))))
    engine = Engine(ParallelConfig(offload_modulation=True), mesh.single())
    engine.load("tiny", str(files["plain"]), "bf16", on_progress=lambda done, total: events.append("read"))
    blocks = [event for event in events if event != "read"]
    assert len(blocks) == 2 * BLOCKS and set(blocks) == {1, 2}  # of single and of double blocks
    assert all("read" in events[i - 1 : i] for i, event in enumerate(events) if event != "read")
