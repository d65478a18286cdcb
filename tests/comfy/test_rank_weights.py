"""ComfyUI's own memory manager with weights of ranks in its list, on GPUs that are not there: their free
memory is a number that models and ranks change."""

import sys
from collections import Counter
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules
from fake_memory import GB

with comfy_modules():
    import comfy.model_management as management
    import comfy.model_patcher
    from comfy_execution.utils import CurrentNodeContext
    from parallel_dit.backend.client import pool
    from parallel_dit.backend.client.auto import measurements, planning
    from parallel_dit.backend.client.auto.model_choice import ModelChoice
    from parallel_dit.backend.client.room import Room
    from parallel_dit.backend.config import ParallelConfig
    from parallel_dit.backend.planner.auto_config import AutoConfig
    from parallel_dit.backend.protocol import Loaded, Welcome
    from parallel_dit.nodes.host import auto_plan, models_on_ranks, rank_weights
    from parallel_dit.nodes.host.rank_weights import RankWeights

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
CPU = torch.device("cpu")


class TextEncoder(comfy.model_patcher.ModelPatcher):
    """A model of ComfyUI's own, of which only the size is there."""

    def __init__(self, device, size, free):
        super().__init__(torch.nn.Linear(1, 1), device, CPU, size)
        self.bytes_free = free

    def loaded_size(self):
        return self.model.model_loaded_weight_memory

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        self.model.model_loaded_weight_memory = self.size
        self.bytes_free[self.load_device] -= self.size
        return self.size

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
        self.detach()
        return self.size

    def detach(self, unpatch_all=True):
        if unpatch_all and self.loaded_size():
            self.model.model_loaded_weight_memory = 0
            self.bytes_free[self.load_device] += self.size
        return self.model


@pytest.fixture
def free(monkeypatch):
    """Device -> free bytes; ComfyUI's list is empty."""
    found = Counter({FIRST: 24 * GB, SECOND: 24 * GB})

    def get_free_memory(device=None, torch_free_too=False):
        count = found[device or FIRST]
        return (count, 0) if torch_free_too else count

    monkeypatch.setattr(management, "get_free_memory", get_free_memory)
    monkeypatch.setattr(management, "get_torch_device", lambda: FIRST)
    monkeypatch.setattr(management, "get_all_torch_devices", lambda: [FIRST, SECOND], raising=False)
    monkeypatch.setattr(management, "current_loaded_models", [])
    return found


class OnRanks:
    """A transformer of 12 GB on each of two ranks; ``freed``: from which it was taken, () for all."""

    def __init__(self, free, devices=(FIRST, SECOND)):
        self.free = free
        self.freed = []
        self.busy = False
        self.entries = [RankWeights(device, 12 * GB, self.take, (device.index,)) for device in devices]
        self.load()

    def load(self):
        for entry in self.entries:
            self.free[entry.load_device] -= 0 if entry.held else entry.size
            entry.register()

    def take(self, ranks) -> bool:
        if self.busy:
            return False
        self.freed.append(ranks)
        for entry in self.entries:
            if entry.ranks == ranks or not ranks:
                self.free[entry.load_device] += entry.size
                entry.held = False
        return True


def test_room_for_a_rank_takes_the_text_encoder_and_leaves_its_weights(free):
    ranks = OnRanks(free)
    encoder = TextEncoder(FIRST, 9 * GB, free)
    management.load_models_gpu([encoder], minimum_memory_required=0)
    room = Room(management, {"GPU-0": FIRST, "GPU-1": SECOND})
    welcome = Welcome(2, "cuda", {}, [], ["GPU-0", "GPU-1"])
    assert room.shared_ranks(welcome) == [0]
    keep = [entry for entry in management.current_loaded_models if entry.model in ranks.entries]
    room.keeping(keep).make(welcome, {0: 8 * GB})
    assert free[FIRST] == 12 * GB and not encoder.loaded_size()
    assert not ranks.freed and all(entry.held for entry in ranks.entries)


@pytest.mark.parametrize("smart", [True, False])
def test_a_full_device_takes_the_weights_that_are_on_it(free, monkeypatch, smart):
    """And no others: those are not in the way. ComfyUI may ask for more memory than there is."""
    monkeypatch.setattr(management, "DISABLE_SMART_MEMORY", not smart)
    ranks = OnRanks(free)
    management.free_memory(20 * GB, FIRST)
    assert ranks.freed == [(0,)] and (free[FIRST], free[SECOND]) == (24 * GB, 12 * GB)
    assert [entry.loaded_size() for entry in ranks.entries] == [0, 12 * GB]
    management.free_memory(20 * GB, SECOND)
    assert ranks.freed == [(0,), (1,)] and free[SECOND] == 24 * GB


def test_a_full_device_leaves_the_weights_that_are_elsewhere(free):
    """They were taken before, though that freed nothing there."""
    ranks = OnRanks(free, [SECOND])
    TextEncoder(FIRST, 20 * GB, free)
    free[FIRST] = 2 * GB
    management.free_memory(20 * GB, FIRST)
    assert not ranks.freed


def test_a_node_that_wants_memory_waits_for_a_step_that_was_left(free):
    """Before anything is loaded into what is free: that step may yet take it. Nobody else waits."""
    ranks, waits = OnRanks(free), []
    for entry in ranks.entries:
        entry.settle = lambda device=entry.load_device: waits.append(device)
    management.free_memory(1 * GB, FIRST)
    assert not waits
    with CurrentNodeContext("p", "7"):
        management.free_memory(1 * GB, FIRST)
    assert waits == [FIRST] and not ranks.freed


@pytest.fixture
def left(monkeypatch):
    """What auto is told: (GPU, bytes of weights that could have stayed)."""
    found = []
    monkeypatch.setattr(planning, "note_left", lambda *told: found.append(told))
    monkeypatch.setattr(rank_weights, "loaded_models", lambda graph: {ModelChoice("/model")})
    return found


def test_auto_is_told_what_could_have_stayed(free, left):
    """Of 12 GB on 24: a decode of 15 GB lacks 3 of them, a text encoder of 24 GB all."""
    ranks = OnRanks(free)
    with CurrentNodeContext("prompt", "decode"):
        management.free_memory(15 * GB, FIRST)
        assert ranks.freed == [(0,)] and left == [(0, 9 * GB)]
        ranks.load()
        management.free_memory(12 * GB, FIRST)  # there is room
        assert ranks.freed == [(0,)]
        management.free_memory(24 * GB, FIRST)
    assert ranks.freed == [(0,)] * 2 and left[1:] == [(0, 0)]


def test_auto_is_told_of_all_models_there(free, left):
    """Of two of 12 GB on one GPU, of which 4 GB are lacking, 20 GB could have stayed."""
    free[FIRST] = 30 * GB
    first, second = OnRanks(free, [FIRST]), OnRanks(free, [FIRST])
    with CurrentNodeContext("prompt", "decode"):
        management.free_memory(10 * GB, FIRST)
    assert first.freed + second.freed == [(0,)] and left == [(0, 20 * GB)]


def test_auto_is_not_told_where_comfyui_needs_nothing(free, left):
    """Outside of a node Unload Models takes them; another model of the ranks may be what needs the room."""
    ranks = OnRanks(free)
    management.unload_all_models()
    ranks.load()
    with CurrentNodeContext("prompt", "sampler"):
        room = rank_weights.host_room()
        room.free(20 * GB, FIRST)
    assert ranks.freed == [(), (0,)] and not left and not room.is_making


def test_auto_is_not_told_of_a_graph_without_ours(free, left, monkeypatch):
    """Another graph's model took them once, and every later plan counted weights that leave."""
    ranks = OnRanks(free)
    monkeypatch.setattr(rank_weights, "loaded_models", lambda graph: set())
    with CurrentNodeContext("prompt", "decode"):
        management.free_memory(24 * GB, FIRST)
    assert ranks.freed == [(0,)] and not left


@pytest.mark.parametrize("devices", [(FIRST, SECOND), (SECOND,)])
def test_unload_models_takes_them_anywhere(free, devices):
    """From all ranks at once, though ComfyUI goes from device to device."""
    ranks = OnRanks(free, devices)
    for _ in range(2):
        management.unload_all_models()
        assert ranks.freed.pop() == () and not ranks.freed
        ranks.load()
    management.free_memory(20 * GB, SECOND)
    assert ranks.freed == [(1,)]


def test_weights_in_use_stay_in_the_list(free):
    """A request runs: nothing is freed and nothing is claimed to be."""
    ranks = OnRanks(free)
    ranks.busy = True
    for size in (11 * GB, 18 * GB, 30 * GB):
        management.free_memory(size, FIRST)
    management.unload_all_models()
    listed = [entry.model for entry in management.current_loaded_models]
    assert not ranks.freed and all(entry.held and entry in listed for entry in ranks.entries)
    ranks.busy = False
    management.free_memory(18 * GB, FIRST)
    assert ranks.freed == [(0,)]


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_models_of_comfyui_go_first(free, is_dynamic):
    """A dynamic one holds a little more than it says, and yields where its memory is wanted."""
    ranks = OnRanks(free)
    encoder = TextEncoder(FIRST, 9 * GB, free)
    management.load_models_gpu([encoder], minimum_memory_required=0)
    encoder.is_dynamic = lambda: is_dynamic
    encoder.loaded_size = lambda: encoder.size + GB // 32
    ranks.entries[0].size = GB  # the smaller one
    wanted = free[FIRST] + 2 * GB
    if not is_dynamic:
        management.free_memory(wanted, FIRST)
    elif "for_dynamic" in signature(management.free_memory).parameters:
        management.free_memory(wanted, FIRST, for_dynamic=True)
    assert not ranks.freed


def test_a_preview_between_two_calls_takes_no_weights(free, monkeypatch):
    """Of a sampling by Parallel Model, whose next call needs them; a rank that lacks memory may still have
    another model's."""
    ranks = OnRanks(free)
    monkeypatch.setattr(models_on_ranks, "_weights", {"dit": (None, ranks.entries)})
    with models_on_ranks.rank_weights_stay():
        models_on_ranks.keep_rank_weights(management.free_memory, 18 * GB, FIRST)
        management.free_memory(18 * GB, FIRST)
        assert not ranks.freed
        rank_weights.host_room().free(18 * GB, FIRST)
        assert ranks.freed == [(0,)]
    management.free_memory(18 * GB, SECOND)
    assert ranks.freed == [(0,), (1,)]


def test_making_a_model_without_weights_ready_takes_none(free, monkeypatch):
    ranks = OnRanks(free)
    monkeypatch.setattr(models_on_ranks, "_weights", {"dit": (None, ranks.entries)})
    free[FIRST] = GB // 10
    weightless = TextEncoder(FIRST, 1, free)
    models_on_ranks.keep_rank_weights(management.load_models_gpu, [weightless])
    assert not ranks.freed
    listed = [entry.model for entry in management.current_loaded_models]
    assert all(entry in listed for entry in ranks.entries)


def test_sizes_are_those_of_each_device(free, monkeypatch):
    monkeypatch.setattr(rank_weights, "host_room", lambda: Room(management, {"GPU-0": FIRST}))
    reports = [{"weight_bytes": 3 * GB}, {"weight_bytes": 5 * GB}]
    loaded = Loaded("m", "flux", {"ranks": reports})
    here = Welcome(2, "cuda", {}, [], ["GPU-0", "GPU-of-another-machine"])
    (entry,) = rank_weights.entries(loaded, here, lambda ranks: True)
    assert (entry.load_device, entry.model_size(), entry.ranks) == (FIRST, 3 * GB, (0,))
    ram = rank_weights.device_name(CPU)
    (entry,) = rank_weights.entries(loaded, Welcome(2, "cpu", {}, [], [ram, ram]), lambda ranks: True)
    assert (entry.load_device, entry.model_size(), entry.ranks) == (CPU, 8 * GB, (0, 1))


def test_dynamic_models_are_free_memory_to_auto(monkeypatch):
    """They hold a whole GPU after a run, outside of torch's allocator, and leave for the ranks."""
    analyzed = SimpleNamespace(vbars_analyze=lambda index: 20 * GB if index == 0 else 0)
    monkeypatch.setitem(sys.modules, "comfy_aimdo.model_vbar", analyzed)
    own = SimpleNamespace(aimdo_enabled=True)
    monkeypatch.setattr(rank_weights.comfy, "memory_management", own, raising=False)
    assert rank_weights.dynamic_weights in measurements.HELD
    assert [rank_weights.dynamic_weights(index) for index in (0, 1)] == [20 * GB, 0]
    own.aimdo_enabled = False
    assert rank_weights.dynamic_weights(0) == 0


@pytest.mark.parametrize(
    "launched, measured, device, gpus, asked",
    [
        (False, False, "cuda", 2, [[0, 1]]),
        (True, True, "cuda", 2, []),
        (True, False, "cuda", 2, [[0, 1]]),
        (True, False, "cuda", 1, []),
        (False, False, "cpu", 2, []),
    ],
)
def test_what_measures_gpus_has_room(monkeypatch, launched, measured, device, gpus, asked):
    """Ranks that run were measured before them, or end: those of degrees of one's own. One GPU never is."""
    found, ended = [], []
    monkeypatch.setattr(auto_plan, "host_room", lambda: SimpleNamespace(make_for_start=found.append))
    monkeypatch.setattr(auto_plan.measurements, "is_measured", lambda device, indices: measured)
    monkeypatch.setattr(pool, "launched", lambda: SimpleNamespace() if launched else None)
    monkeypatch.setattr(pool, "close_idle", ended.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    own = torch.device("cuda", 1)
    monkeypatch.setattr(auto_plan.comfy.model_management, "get_torch_device", lambda: own)
    shared = []
    monkeypatch.setattr(auto_plan.planning, "note_shared", shared.append)
    monkeypatch.setattr(auto_plan.planning, "plan_for", lambda *_: (None, ()))
    monkeypatch.setattr(auto_plan.planning, "question_of", lambda *_: (None, ()))
    auto = AutoConfig(base=ParallelConfig(device=device), gpus="2" * (device == "cpu"))
    auto_plan.plan_under_node(planning.Asked(auto, None, None))
    auto_plan.question_for_page(auto, None, None, lambda: None)
    assert found == 2 * asked and ended == [0, 0] * (launched and bool(asked))
    assert shared == [1, 1] * (device == "cuda")
