"""Host memory for weights that wait: in few pieces, page locked where that can be, reused the next time."""

from types import SimpleNamespace

import pytest
import torch
from fake_memory import GB
from quantized import write_scaled
from ranks.flux_requests import FEW, Case, request_of
from tiny import shallow_flux, weights_module

from backend import engine as engine_module
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.hardware import host_memory
from backend.loading import parking
from backend.parallel import fsdp, mesh
from backend.sampling.model_runner import LoadedModel
from backend.sampling.step_loop import Callbacks


def test_host_memory_is_in_few_pieces(monkeypatch):
    """Tensors of any layout keep it, and none overlaps another. What a larger one leaves of its piece, which
    is a power of two as torch makes it anyway, others fill."""
    monkeypatch.setattr(host_memory, "PIECE", 4096)
    shapes = [(3, 5), (7,), (), (0, 4), (40, 40), (16, 16), (2, 3, 4), (16, 24)]
    tensors = [torch.randn(shape) for shape in shapes]
    tensors += [torch.randn(6, 4).t(), torch.randn(5, 3).to(torch.bfloat16)]
    memory = host_memory.HostMemory(pinned=False)
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

    monkeypatch.setattr(host_memory, "PIECE", 4096)
    monkeypatch.setattr(torch, "empty", limited)
    memory = host_memory.HostMemory(pinned=True)
    tensors = [torch.randn(40, 20), torch.randn(40, 20)]
    assert all(memory.like(each).copy_(each).equal(each) for each in tensors)
    assert made == [True, False, False]
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "page locked (CUDA error: out of memory)" in told


@pytest.fixture
def page_locked(monkeypatch):
    """Accounts of page-locked memory, of which this machine has none: ordinary memory stands for it."""
    empty = torch.empty
    accounts = host_memory.PageLocked()
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **named: empty(*sizes, **named))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host_memory, "PIECE", 1 << 12)
    for module in (host_memory, parking, engine_module):
        monkeypatch.setattr(module, "PAGE_LOCKED", accounts)
    return accounts


@pytest.mark.parametrize("free, reusable", [(GB, 1 << 12), (1 << 11, 0)], ids=["room", "no room"])
def test_page_locked_memory_is_reused_the_next_time(page_locked, monkeypatch, free, reusable):
    """Weights that leave at every run would have it locked anew each time, which takes longer than to copy
    them. Where half of what the host has is less, it goes back."""
    monkeypatch.setattr(parking, "host_free", lambda swap: free)
    given_back = []
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: given_back.append(1))
    weights = torch.nn.Linear(8, 8, device="meta").to_empty(device="cpu")
    weights._apply(host_memory.HostMemory(pinned=True).moved)
    assert (page_locked.used, page_locked.reusable) == (1 << 12, 0)
    parking.to_device([weights], torch.device("meta"))
    assert (page_locked.used, page_locked.reusable, len(given_back)) == (0, reusable, not reusable)
    again = page_locked.lock(1 << 12)
    assert (page_locked.used, page_locked.reusable) == (again.nbytes, 0)


@pytest.mark.parametrize("has_public", [True, False], ids=["torch 2.12", "older"])
def test_page_locked_memory_goes_back(page_locked, monkeypatch, has_public):
    called = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: called.append("private"), raising=False)
    if has_public:
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: called.append("public"))
    else:
        monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
    page_locked.reusable = GB
    Engine(ParallelConfig(), mesh.single()).unload("of no name")
    assert called == ["public" if has_public else "private"] and page_locked.reusable == 0


def test_what_is_page_locked_counts_as_free(monkeypatch):
    monkeypatch.setattr(parking, "host_free", lambda swap: GB)
    assert not parking.has_room(GB) and parking.has_room(GB, page_locked=GB)


def test_swap_is_no_room_for_parked_weights(monkeypatch):
    asked = []
    monkeypatch.setattr(parking, "host_free", lambda swap=True: asked.append(swap) or 2 * GB)
    assert parking.has_room(GB) and asked == [False]


@pytest.fixture
def copied(monkeypatch):
    """Host memory that is a list of its tensors, whatever else is there being the device's."""
    monkeypatch.setattr(parking, "COPIES", parking.StoredCopies())
    copied, like = [], host_memory.HostMemory.like

    def recorded(memory, tensor):
        copied.append(like(memory, tensor))
        return copied[-1]

    def is_there(tensor):
        return any(tensor.data_ptr() == each.data_ptr() for each in copied)

    monkeypatch.setattr(host_memory.HostMemory, "like", recorded)
    monkeypatch.setattr(parking, "_is_page_locked", is_there)
    monkeypatch.setattr(parking, "_leaves", lambda tensor: not tensor.is_meta and not is_there(tensor))
    return copied


def test_stored_weights_are_copied_to_the_host_once(copied, tmp_path, monkeypatch):
    """Others may have a LoRA in them since. What a file stores stays there, unless it lacks room."""
    state = weights_module().state_dict(shallow_flux())
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_scaled(tmp_path / "fp8.safetensors", state, "float8_e4m3fn")), "bf16")
    model, sample = engine.models["tiny"], request_of(Case("euler_simple", FEW))
    before, _ = engine.sample(sample, Callbacks())
    every = {id(each) for module in model.modules for each in module.parameters() if not each.is_meta}
    stored = {id(each) for weight in parking.quantized(model.modules) for each in weight.parameters()}
    times = []
    for _ in range(3):
        had = len(copied)
        engine.park(model, {0})
        times.append(len(copied) - had)
        latent, _ = engine.sample(sample, Callbacks())
        assert latent.equal(before) and parking.COPIES.bytes > 0
    assert times[0] >= len(every) and times[1] == times[2] == times[0] - len(stored)
    monkeypatch.setattr(parking, "host_free", lambda swap: 0)
    engine.park(model, {0})
    engine.fused("tiny")
    assert parking.COPIES.bytes == 0


@pytest.mark.parametrize("ranks, stays", [({0}, True), ({0, 1}, False)], ids=["one rank", "both ranks"])
def test_copies_of_one_rank_are_not_counted_for_all(copied, tmp_path, monkeypatch, ranks, stays):
    """Half of what the host can give stays free: for copies of one rank here, not for those of two."""
    state = weights_module().state_dict(shallow_flux())
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_scaled(tmp_path / "fp8.safetensors", state, "float8_e4m3fn")), "bf16")
    model = engine.models["tiny"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    engine.park(model, ranks)
    monkeypatch.setattr(parking, "host_free", lambda swap=True: round(1.5 * parking.page_locked_bytes()))
    engine.fused("tiny")
    assert (parking.COPIES.bytes > 0) == stays


def test_modules_may_come_one_after_the_other(copied):
    """As those of a block do whose modulation waits on the host."""
    modules = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]
    parking.to_host(iter(modules), pinned=False)
    assert len(copied) == 4


@pytest.mark.parametrize("free, locks", [(16 * 9 * 4, True), (16 * 9 * 4 - 1, False)])
def test_modulation_is_page_locked_where_the_host_has_room_for_all_ranks(monkeypatch, free, locks, capsys):
    """Each rank has a copy of its own, and locked memory cannot be swapped out."""
    monkeypatch.setattr(parking, "host_free", lambda swap: free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(parking.PAGE_LOCKED, "reusable", 0)
    layers = [torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)]
    assert parking.may_page_lock(layers) == locks
    assert ("of each of 4 ranks" in capsys.readouterr().out) != locks


def test_a_lora_on_weights_that_wait_leaves_them_page_locked(monkeypatch):
    """Their memory is theirs, and not a file's."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    before = parameter.data_ptr()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() == before)
    fsdp.assign(parameter, torch.ones(2, 2))
    assert parameter.data_ptr() == before and parameter.eq(1).all()
    monkeypatch.undo()
    fsdp.assign(parameter, torch.full((2, 2), 2.0))
    assert parameter.data_ptr() != before and parameter.eq(2).all()


def test_weights_on_the_host_are_not_counted_as_the_gpus():
    """Auto would plan with memory that is not there, and parking would ask for room twice. The meta device is
    the GPU here."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3, device="meta"))
    assert fsdp.bytes_on(model, torch.device("meta")) == 9 * 4
    assert fsdp.bytes_on(model, torch.device("cpu")) == 6 * 4


def test_offloaded_modulation_stays_where_it_is():
    """The meta device is the GPU here."""
    model = torch.nn.ModuleDict({"block": torch.nn.Linear(2, 2), "modulation": torch.nn.Linear(2, 2)})
    parking.to_device([model], torch.device("meta"), [model["modulation"]])
    assert model["block"].weight.is_meta and not model["modulation"].weight.is_meta


@pytest.mark.parametrize(
    "device, sharded, parks", [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_what_is_on_the_host_or_tied_to_buffers_is_not_parked(device, sharded, parks):
    weights = SimpleNamespace(device=torch.device(device))
    model = SimpleNamespace(weights=weights, sharded=sharded)
    assert LoadedModel.can_park.__get__(model) == parks


def test_copies_have_arrived_before_their_memory_is_given_back(monkeypatch):
    """Else the next tensor in it would be what arrives."""
    done = []
    locked = SimpleNamespace(reusable=GB, give_back=lambda: done.append("given back"))
    monkeypatch.setattr(parking, "PAGE_LOCKED", locked)
    monkeypatch.setattr(parking, "COPIES", SimpleNamespace(bytes=GB, keep=print, forget=print))
    monkeypatch.setattr(parking, "host_free", lambda swap: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"{device} waited"))
    parking.to_device([], torch.device("cuda:1"))
    assert done == ["cuda:1 waited", "given back"]
