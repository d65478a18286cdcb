"""Parked weights leave the device whole, and come back to the last bit. Host memory is the device here, and
another place in it is the host's: no GPU."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_memory import GB, FakeMemory, on_ranks
from quantized import write_gguf, write_scaled
from ranks.flux_requests import FEW, Case, request_of
from tiny import BLOCKS, save_whole, shallow_flux, weights_module

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.hardware import host_memory
from backend.loading import parking
from backend.parallel import mesh
from backend.protocol import Sample, Unload
from backend.rank import worker as rank_module
from backend.rank.admission import Admission, InsufficientMemory, Planned, out_of_memory_error
from backend.rank.leader import Leader
from backend.rank.worker import Worker
from backend.rank_plan.need import Need
from backend.sampling.step_loop import Callbacks, RequestCancelled
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
    sample = request_of(Case("euler_simple", FEW))
    before, _ = engine.sample(sample, Callbacks())
    model = engine.models["tiny"]
    storages = [p.untyped_storage() for module in model.modules for p in module.parameters()]
    # what is mapped from the file is in no device's memory
    old = [weakref.ref(each) for each in storages if each.nbytes() != files[kind].stat().st_size]
    del storages
    engine.park(model, {0})
    assert old and model.parked and not [storage for storage in old if storage() is not None]
    after, _ = engine.sample(sample, Callbacks())
    assert not model.parked and after.equal(before)


#: Of three ranks with 1 GB of weights each: the number of the machine of each.
MACHINES = [0, 0, 1]


def unloaded(monkeypatch, free: int, *messages: Unload, lora: int = 0) -> list[tuple[list[int], list[str]]]:
    """Have three ranks unload, whose machines have ``free`` bytes, weights and a ``lora``; what each returns
    last, and does."""

    def act(number, control, memory):
        calls = []

        def park(model, ranks):
            calls.append("park" if number in ranks - model.parked_on else "keep")
            model.parked_on |= ranks

        parts = {"can_park": True, "parked_on": frozenset(), "report": SimpleNamespace(weight_bytes=GB)}
        parts |= {"held_lora_bytes": lora}
        models = {"m": SimpleNamespace(**parts)}
        rank = Worker.__new__(Worker)
        rank.mesh = SimpleNamespace(rank=number, world_size=len(MACHINES))
        rank.machines = MACHINES
        rank.engine = SimpleNamespace(models=models, park=park, unload=lambda name: calls.append("unload"))
        rank.engine.parks = True
        rank.control, rank.reports = control, {}
        rank.admission = SimpleNamespace(forget=lambda: None)
        return [rank.unload(message) for message in messages][-1], calls

    monkeypatch.setattr(parking, "host_free", lambda swap: free)
    return on_ranks([FakeMemory(GB)] * len(MACHINES), act)[0]


def test_only_the_ranks_that_are_in_the_way_park(monkeypatch):
    """A text encoder needs room on the GPU of rank 1; the others keep their weights."""
    found = unloaded(monkeypatch, 2 * GB, Unload("m", True, [1]))
    assert found == [([1], ["keep"]), ([1], ["park"]), ([1], ["keep"])]
    found = unloaded(monkeypatch, 2 * GB, Unload("m", True, [1]), Unload("m", True, [2, 1]))
    assert found == [([1, 2], ["keep"] * 2), ([1, 2], ["park", "keep"]), ([1, 2], ["keep", "park"])]
    assert unloaded(monkeypatch, 2 * GB, Unload("m", True, [7, "x", [], None])) == [([], ["keep"])] * 3


@pytest.mark.parametrize("ranks, free", [([], 4), ([0, 1, 2], 4), ([0], 2), ([0, 2], 2)])
def test_those_park_for_which_their_machines_have_room(monkeypatch, ranks, free):
    """Of half of its free memory, for the ranks of each that leave; else every rank frees its weights: a load
    is one of all of them."""
    parks = ranks or [0, 1, 2]
    message = Unload("m", True, ranks)
    here = unloaded(monkeypatch, free * GB, message)
    assert here == [(parks, ["park" if rank in parks else "keep"]) for rank in range(3)]
    assert unloaded(monkeypatch, free * GB - 1, message) == [([0, 1, 2], ["unload"])] * 3
    assert unloaded(monkeypatch, free * GB, Unload("m")) == [([0, 1, 2], ["unload"])] * 3
    with_lora = unloaded(monkeypatch, free * GB, message, lora=1)  # which leaves, too
    assert with_lora == [([0, 1, 2], ["unload"])] * 3


def test_what_leaving_ranks_have_page_locked_is_room(monkeypatch):
    """From the time before, up to the bytes of their weights; what another rank keeps is none for them."""
    monkeypatch.setattr(parking, "PAGE_LOCKED", host_memory.PageLocked(reusable=2 * GB))
    assert [acts for _, acts in unloaded(monkeypatch, 2 * GB, Unload("m", True))] == [["park"]] * 3
    assert unloaded(monkeypatch, 2 * GB - 1, Unload("m", True)) == [([0, 1, 2], ["unload"])] * 3


def test_the_status_counts_what_is_on_the_devices():
    """Not what is parked."""
    leader = Leader.__new__(Leader)
    models = {"m": SimpleNamespace(parked_on={1}), "n": SimpleNamespace(parked_on=frozenset())}
    leader.engine, leader.beats = SimpleNamespace(models=models), None
    leader.reports = {key: [{"weight_bytes": GB}] * 2 for key in ("m", "n", "left")}
    assert [leader._of_rank(rank)["weight_bytes"] for rank in (0, 1)] == [2 * GB, GB]


def test_weights_of_a_rank_that_is_not_in_the_way_stay(files, monkeypatch):
    """It counts as the others do which are parked, and forgets clients' arguments as they do."""
    monkeypatch.setattr(parking, "to_host", copied)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(files["plain"]), "bf16")
    model = engine.models["tiny"]
    weight = model.transformer.x_embedder.weight.data_ptr()
    forgets = []
    monkeypatch.setattr(engine.argument_cache, "clear", lambda: forgets.append(True))
    engine.park(model, {1})
    assert (model.parked, model.parked_on, forgets) == (False, {1}, [True])
    engine.fused("tiny")
    assert not model.parked_on and model.transformer.x_embedder.weight.data_ptr() == weight


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
    rank.engine = SimpleNamespace(
        memory=memory, sample=sample, models={}, lora_stacks={}, prepare_sample=print
    )
    rank.admission = SimpleNamespace(
        prepare=lambda *_: SimpleNamespace(model=SimpleNamespace(dequantized_bytes=0))
    )
    rank.engine.models["m"] = SimpleNamespace(parked_on=frozenset())
    rank.clock = StepClock(None)
    rank._try_kernel = lambda *_: None
    return rank


@pytest.mark.parametrize("others", [True, False])
def test_what_would_fit_is_planned_when_nothing_else_can_leave(others, monkeypatch):
    """It takes seconds of each turn of two experts; a client has the other one leave first."""
    says = "It would fit with nothing."
    monkeypatch.setattr(Planned, "shortage", lambda *_: says)

    def act(rank, control, memory):
        plans = Planned(None, [], [Need(2 * GB, 2 * GB)], True, others=others)
        Admission(ParallelConfig(), control, memory).check(plans)

    [refused], _ = on_ranks([FakeMemory(GB)], act)
    assert isinstance(refused, InsufficientMemory) and refused.lacking == {0: 2 * GB}
    assert ("Other models are on the ranks" in str(refused)) == others == (str(refused) != says)


def test_the_ranks_hold_others_until_all_of_these_are_parked():
    """Those that the same client has loaded: it cannot have another one's leave."""
    leader, (own, other) = Leader.__new__(Leader), [SimpleNamespace(parked_on=frozenset()) for _ in range(2)]
    leader.mesh, job = SimpleNamespace(world_size=2), SimpleNamespace(client="here")
    leader.engine = SimpleNamespace(models={"own": own, "own+lora": own, "other": other})
    leader.named = {"here": {"own"}, "there": {"other"}}
    assert not leader._holds_others(job, own) and leader._holds_others(job)
    leader.named["here"].add("other")
    assert leader._holds_others(job, own)
    other.parked_on = frozenset({0, 1})
    assert not leader._holds_others(job, own)


def test_memory_that_runs_out_in_between_is_said_with_numbers():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    alone = out_of_memory_error(0, 1, FakeMemory(GB, GB), error)
    among = out_of_memory_error(1, 2, FakeMemory(GB), error)
    assert isinstance(alone, InsufficientMemory) and not isinstance(among, InsufficientMemory)
    assert "rank 0 ran out of memory" in str(alone) and "2.00 GB free" in str(alone)
    assert "rank 1 ran out of memory" in str(among) and "Tried to allocate 2.00 GiB" in str(among)


@pytest.mark.parametrize("ranks, error", [(1, "InsufficientMemory"), (2, "FatalOutOfMemory")])
def test_memory_that_runs_out_ends_a_rank_only_where_another_waits(ranks, error):
    rank = worker(ranks)
    with pytest.raises(Exception, match="rank 0 ran out of memory .* 2.00 GB free") as raised:
        rank.run_sample(Sample("m", "euler", 1.0, 7), Callbacks())
    # among several the rank ends: to give memory back it would wait for its GPU, which may wait for a peer's
    assert type(raised.value).__name__ == error and rank.engine.memory.released == (ranks == 1)


@pytest.mark.parametrize("ranks, error", [(1, "InsufficientMemory"), (2, "FatalOutOfMemory")])
def test_so_does_memory_that_is_gone_before_a_call_like_the_one_before(ranks, error):
    """No round has asked for room again."""

    def prepare(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    rank = worker(ranks)
    rank.engine.prepare_call, rank.admission = print, SimpleNamespace(prepare=prepare)
    with pytest.raises(Exception, match="rank 0 ran out of memory .* 2.00 GB free") as raised:
        rank.run_call(SimpleNamespace(model="m", attention="auto"))
    assert type(raised.value).__name__ == error and rank.engine.memory.released == (ranks == 1)


@pytest.mark.parametrize("parked_on", [set(), {0}, {1}, {0, 1}], ids=str)
def test_a_refused_request_leaves_ranks_parked_as_they_were(parked_on):
    """One had no room for its weights, others have theirs back: they must enter the next rounds alike."""
    rank, parks = worker(2), []

    def refuse(message, prepare, was_parked, planned, lacks):
        assert was_parked == parked_on and lacks() == (GB if 0 in parked_on else 0)
        model.parked_on = set()
        raise InsufficientMemory("rank 1 lacks memory", {1: GB})

    parked = 0 in parked_on
    stack = SimpleNamespace(stack=())
    model = SimpleNamespace(parked=parked, parked_on=parked_on, weights=stack, held_lora_bytes=GB)
    rank.engine.models["m"], rank.engine.park = model, lambda *given: parks.append(given)
    rank.admission.prepare = refuse
    with pytest.raises(InsufficientMemory):
        rank.run_sample(Sample("m", "euler", 1.0, 7), Callbacks())
    assert parks == ([(model, parked_on)] if parked_on else [])


def test_weights_that_came_back_in_part_are_parked_whole(files, monkeypatch):
    """The meta device is the host here."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(files["plain"]), "bf16")
    model = engine.models["tiny"]
    model.cache.hosted = [[hosted := torch.nn.Linear(1, 1)]]  # modulation of another stage's blocks

    def to_host(modules, pinned, ranks):
        for module in modules:
            module.to("meta")

    def runs_out(modules, device, but, ranks):
        assert modules == [model.transformer, hosted]
        model.transformer.x_embedder.to_empty(device=device)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(parking, "to_host", to_host)
    monkeypatch.setattr(parking, "to_device", runs_out)
    engine.park(model, {0})
    with pytest.raises(torch.OutOfMemoryError):
        engine.fused("tiny")
    assert not model.transformer.x_embedder.weight.is_meta
    engine.park(model, {0})
    assert model.parked and all(each.is_meta for module in model.modules for each in module.parameters())


@pytest.mark.parametrize("shared, released", [([0], 1), ([1], 0), ([], 0)])
def test_cached_memory_goes_back_after_a_request_on_shared_devices(shared, released):
    rank = worker(1)
    rank.engine.sample = lambda *_: ("samples", {})
    assert rank.run_sample(Sample("m", "euler", 1.0, 7, shared_ranks=shared), Callbacks()) == ("samples", {})
    assert rank.engine.memory.released == released


@pytest.mark.parametrize("ranks, given_back", [("1", 0), ("4", 1)])
def test_page_locked_memory_of_all_ranks_of_a_machine_counts(ranks, given_back, monkeypatch):
    found = []
    locked = SimpleNamespace(reusable=3 * GB, give_back=lambda: found.append("given back"))
    monkeypatch.setattr(parking, "PAGE_LOCKED", locked)
    monkeypatch.setattr(parking, "host_free", lambda swap: 4 * GB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    parking.to_device([], torch.device("cpu"))
    assert len(found) == given_back


def test_what_a_cancelled_request_held_goes_back_too():
    """Its keys and values are in the frames of what it raised."""
    rank, alive = worker(1), []

    def cancelled(*_):
        keys = torch.zeros(1)
        alive.append(weakref.ref(keys))
        raise RequestCancelled(2)

    rank.engine.sample = cancelled
    rank.engine.memory.release = lambda: alive.append(alive[0]())
    with pytest.raises(RequestCancelled):
        rank.run_sample(Sample("m", "euler", 1.0, 7, shared_ranks=[0]), Callbacks())
    assert alive[1:] == [None]


def test_modulation_is_offloaded_where_nothing_can_be_page_locked(files, monkeypatch, capsys):
    """Here torch cannot, without a GPU."""
    engine = Engine(ParallelConfig(offload_modulation=True), mesh.single())
    engine.load("tiny", str(files["plain"]), "bf16")
    cache = engine.models["tiny"].cache
    cache.mesh = replace(cache.mesh, device=torch.device("cuda", 0))
    before = [layer.weight.clone() for layer in cache.offloaded]
    cache.offload()
    after = [layer.weight for layer in cache.offloaded]
    assert before and all(a.equal(b) for a, b in zip(after, before, strict=True))
    if not torch.cuda.is_available():
        assert capsys.readouterr().err.count("can be page locked") == 1


def test_a_load_offloads_each_block_before_the_next(files, monkeypatch):
    """All modulation at once would need the memory that offloading saves."""
    events = []
    monkeypatch.setattr(parking, "to_host", lambda modules, pinned: events.append(len(list(modules))))
    engine = Engine(ParallelConfig(offload_modulation=True), mesh.single())
    engine.load("tiny", str(files["plain"]), "bf16", on_progress=lambda done, total: events.append("read"))
    blocks = [event for event in events if event != "read"]
    assert len(blocks) == 2 * BLOCKS and set(blocks) == {1, 2}  # of single and of double blocks
    assert all("read" in events[i - 1 : i] for i, event in enumerate(events) if event != "read")


def test_cached_memory_goes_back_before_groups_are_made(monkeypatch):
    """NCCL cannot use what torch's allocator caches."""
    rank = worker(2)
    rank.device, rank.engine.drop_for = "cpu", print
    monkeypatch.setattr(rank_module.meshes, "build", lambda *_: {}[rank.engine.memory.released])
    with pytest.raises(KeyError, match="1"):
        rank.arrange(ParallelConfig(ulysses_degree=2))
