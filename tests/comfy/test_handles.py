"""Handles of models in a real ComfyUI's process, on ranks that are not there: their memory is a number."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules
from safetensors.torch import save_file

with comfy_modules():
    import comfy.model_management as management
    from comfy_execution.graph import DynamicPrompt
    from comfy_execution.progress import reset_progress_state
    from parallel_dit.backend.client import pool
    from parallel_dit.backend.client.room import Room
    from parallel_dit.backend.config import ParallelConfig
    from parallel_dit.backend.device_memory import device_name
    from parallel_dit.backend.planner.auto_config import AutoConfig
    from parallel_dit.backend.protocol import Load, Loaded, RefusedError, Result, Sample, Unload, Welcome
    from parallel_dit.nodes.host import graph, handle, model_files, rank_weights
    from parallel_dit.nodes.host.rank_weights import RankWeights

CONFIG = ParallelConfig(address="tcp:host:1")
#: Elsewhere: ComfyUI's manager makes no room there.
DEVICE = "GPU-of-another-machine"


class Ranks:
    """In the client's place: ranks with ``room`` for so many bytes, where each model takes 6. Refuses as the
    backend does; ``held``: the models there."""

    def __init__(self):
        self.welcome = Welcome(1, "cpu", {}, [], [DEVICE])
        self.held: list[str] = []
        self.parked: list[str] = []
        self.room = 10
        self.closed = False

    def request(self, message, *_):
        if isinstance(message, Unload):
            for names in (self.held, self.parked):
                names[:] = [name for name in names if name != message.model]
            self.parked += [message.model] if message.park else []
            return Result({"left": list(range(self.welcome.world_size)), "freed": not message.park})
        if message.path not in self.held:
            self.refuse_without(6)
            self.parked = [name for name in self.parked if name != message.path]
            self.held.append(message.path)
        ranks = [{"weight_bytes": 6, "text": ""}] * self.welcome.world_size
        return Loaded(message.path, "flux", {"ranks": ranks, "warnings": [""] * len(message.loras)})

    def sample(self, message, *_, **__):
        self.refuse_without(0)
        return Result()

    def refuse_without(self, size: int):
        if 6 * len(self.held) + size > self.room:
            error = RefusedError("rank 0 lacks memory to load this model, so nothing is loaded.")
            error.lacking = {0: size}
            raise error

    def is_open(self):
        return True


@pytest.fixture
def backend(monkeypatch):
    """The backend of CONFIG, on Ranks."""
    found = pool.Backend(CONFIG, Ranks())
    monkeypatch.setitem(pool._backends, CONFIG.topology(), found)
    monkeypatch.setattr(handle, "weightless_patcher", lambda loaded: None)
    monkeypatch.setattr(handle, "_weights", {})
    monkeypatch.setattr(management, "current_loaded_models", [])
    monkeypatch.setattr(graph, "wanted_of", lambda inputs: (inputs["model_name"], "default", "auto"))
    yield found
    reset_progress_state("", DynamicPrompt({}))


def run(*names: str):
    """ComfyUI runs a graph that loads these models."""
    nodes = {name: {"class_type": "LoadParallelDiT", "inputs": {"model_name": name}} for name in names}
    reset_progress_state("prompt", DynamicPrompt(nodes))


def test_a_model_that_the_graph_no_longer_names_makes_room(backend):
    """ComfyUI's cache keeps its handle; the other way round, a cached handle is loaded again."""
    run("/a")
    first = handle.load(CONFIG, "/a", "default")
    run("/b")
    second = handle.load(CONFIG, "/b", "default")
    assert backend.client.held == ["/b"] and len(handle._weights) == 1
    run("/a")
    handle.ensure_loaded(first)
    assert backend.client.held == ["/a"] and first.wanted != second.wanted


def test_models_of_a_graph_take_turns_where_they_do_not_fit_together(backend):
    """As Wan's two experts on GPUs where ComfyUI's manager makes no room: parked, they come back soon."""
    run("/a", "/b")
    first, second = (handle.load(CONFIG, name, "default") for name in ("/a", "/b"))
    assert (backend.client.held, backend.client.parked) == (["/b"], ["/a"])
    assert list(backend.models) == [first.wanted, second.wanted]
    handle.ensure_loaded(first)
    assert (backend.client.held, backend.client.parked) == (["/a"], ["/b"])


def test_a_model_that_fits_by_no_means_is_refused(backend):
    run("/a", "/b")
    first = handle.load(CONFIG, "/a", "default")
    backend.client.room = 5
    with pytest.raises(RefusedError, match="nothing is loaded"):
        handle.load(CONFIG, "/b", "default")
    assert (backend.client.held, backend.client.parked) == ([], [first.path])


def test_a_request_takes_the_room_of_models_that_the_graph_does_not_name(backend):
    """The least recently used one first, and no more than it takes."""
    backend.client.room = 18
    names = ["/a", "/b", "/c"]
    run(*names)
    handles = [handle.load(CONFIG, name, "default") for name in names]
    handle.ensure_loaded(handles[0])
    backend.client.room = 12
    run("/c")
    request = Sample("/c", "euler", 1.0, 7, tensors={"noise": torch.zeros(1, 4)})
    result = handle.in_room(backend, handles[2].wanted, lambda: backend.sample(request))
    assert result == Result() and backend.client.held == ["/a", "/c"]


def test_the_other_model_of_a_graph_stays_without_a_handle(backend):
    """As under --cache-none, where ComfyUI drops the first expert's once it was sampled: it was read again
    in every prompt. One that no graph names goes."""
    backend.client.room = 12
    run("/a", "/b")
    for name in ("/a", "/b"):
        handle.load(CONFIG, name, "default")  # which nothing keeps
    assert backend.client.held == ["/a", "/b"]
    assert {wanted[0] for _, wanted in handle._weights} == {"/a", "/b"}  # ComfyUI may take both
    run("/b")
    gc.collect()
    handle.load(CONFIG, "/b", "default")
    assert backend.client.held == ["/b"] and {wanted[0] for _, wanted in handle._weights} == {"/b"}


LOADED, SAMPLED = replace(CONFIG, ulysses_degree=2), replace(CONFIG, pipefusion_degree=2)


@pytest.mark.parametrize("auto, config", [(AutoConfig(), SAMPLED), (None, LOADED)], ids=["auto", "by hand"])
def test_a_lora_takes_the_plan_that_ranks_have(backend, monkeypatch, auto, config):
    """A sampler's plan, not the loader's: that moved the weights twice for a new strength."""
    run("/a")
    backend.process = SimpleNamespace(running=True, models=pool._folders, silence="")
    backend.config = SAMPLED
    backend.models["/a", "default", "auto"] = "/a"
    monkeypatch.setattr(pool, "_backends", {SAMPLED.topology(): backend})
    asked = []
    monkeypatch.setattr(handle, "backend_for", lambda config, *_: asked.append(config) or backend)
    loader = handle.ParallelDiT(LOADED, "/a", "default", None, None, auto=auto)
    found = handle.with_lora(loader, "/lora", 0.5)
    assert asked == [config] and found.config == config and found.loras == (("/lora", 0.5),)


def test_a_lora_of_a_model_that_no_rank_holds_has_the_plan_of_its_loader(backend, monkeypatch):
    backend.process = SimpleNamespace(running=True, models=pool._folders)
    monkeypatch.setattr(pool, "_backends", {SAMPLED.topology(): backend})
    loader = handle.ParallelDiT(LOADED, "/a", "default", None, None, auto=AutoConfig())
    assert handle._at_hand(loader) == LOADED


def test_weights_under_another_topology_are_not_listed_twice(backend):
    """Through the older entry ComfyUI would take the weights that the next request needs."""
    backend.client.welcome = Welcome(1, "cpu", {}, [], [device_name(torch.device("cpu"))])
    loaded = backend.client.request(Load("/a"))
    backend.models["/a", "default", "auto"] = "/a"
    configs = ParallelConfig(ulysses_degree=2), ParallelConfig(ring_degree=2)
    handles = [handle.ParallelDiT(config, "/a", "default", loaded, None) for config in configs]
    for each in handles:
        handle._handles.add(each)
        handle._register(each.config, each.wanted, backend, loaded)
    listed = [entry for entry in management.current_loaded_models if isinstance(entry.model, RankWeights)]
    assert len(listed) == 1 and handle.entries_to_keep(backend, handles[1].wanted) == listed


def test_models_of_a_sampling_stay_where_room_is_made(backend, monkeypatch):
    """Not what ComfyUI's flag says: it stays set on other devices, and goes for a guider's second MODEL."""
    used, encoder = (SimpleNamespace(model=object(), currently_used=flag) for flag in (False, True))
    monkeypatch.setattr(management, "current_loaded_models", [used, encoder])
    wanted = ("/a", "default", "auto")
    assert handle.entries_to_keep(backend, wanted, (used.model,)) == [used]


def test_freeing_weights_frees_the_host_memory_of_parked_ones(backend):
    """ComfyUI's Unload Models leaves them there, which its cache and other programs may need."""
    backend.client.welcome = Welcome(1, "cpu", {}, [], [device_name(torch.device("cpu"))])
    run("/a")
    first = handle.load(CONFIG, "/a", "default")
    (entry,) = handle.entries_to_keep(backend, first.wanted)
    entry.model.detach()
    assert (backend.client.held, backend.client.parked) == ([], ["/a"])
    assert handle.free_weights() == 1 and not backend.client.parked and not backend.models
    assert handle.free_weights() == 0
    handle.ensure_loaded(first)
    assert backend.client.held == ["/a"] and handle.free_weights() == 1 and not backend.client.held


FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class OnGpus(Ranks):
    """Two ranks on GPUs of this ComfyUI, which have less memory than they would like. ``sharded``: weights
    that are not parked; ``unloads``: what they were told."""

    def __init__(self):
        super().__init__()
        self.welcome = Welcome(2, "cuda", {}, [], ["GPU-0", "GPU-1"])
        self.room = 12
        self.sharded = False
        self.unloads: list[Unload] = []

    def request(self, message, *callbacks):
        self.refuse_a_margin(message)
        answer = super().request(message, *callbacks)
        if not isinstance(message, Unload):
            return answer
        self.unloads.append(message)
        left = Result({"left": message.ranks, "freed": False})
        return left if message.ranks and not self.sharded else answer

    def sample(self, message, *callbacks, **named):
        self.refuse_a_margin(message)
        return super().sample(message, *callbacks, **named)

    def refuse_a_margin(self, message):
        if getattr(message, "asking", []):
            error = RefusedError("rank 0 likely lacks memory.")
            error.lacking = {0: 20}
            raise error


@pytest.fixture
def gpus(backend, monkeypatch):
    """The backend on OnGpus, whose GPUs have 4 bytes free whatever leaves them."""
    backend.client = OnGpus()
    room = Room(management, {"GPU-0": FIRST, "GPU-1": SECOND})
    for module in (handle, rank_weights):
        monkeypatch.setattr(module, "host_room", lambda: room)
    monkeypatch.setattr(management, "get_torch_device", lambda: FIRST)
    monkeypatch.setattr(management, "get_all_torch_devices", lambda: [FIRST, SECOND], raising=False)
    monkeypatch.setattr(
        management, "get_free_memory", lambda device, torch_free_too=False: (4, 0) if torch_free_too else 4
    )
    return backend


def held(path: str) -> dict[int, int]:
    """Rank -> bytes of a model that ComfyUI counts on its GPU."""
    entries = [
        entry for (_, (name, *_)), (_, found) in handle._weights.items() for entry in found if name == path
    ]
    return {rank: entry.loaded_size() for entry in entries for rank in entry.ranks}


@pytest.mark.parametrize("sharded", [False, True])
def test_room_on_a_gpu_takes_the_weights_of_its_ranks(gpus, sharded):
    """Sharded ones leave all ranks, and are counted nowhere then."""
    gpus.client.sharded = sharded
    run("/a")
    first = handle.load(CONFIG, "/a", "default")
    management.free_memory(20, SECOND)
    assert gpus.client.unloads == [Unload("/a", True, [1])]
    assert held("/a") == ({0: 0, 1: 0} if sharded else {0: 6, 1: 0})
    handle.ensure_loaded(first)
    assert held("/a") == {0: 6, 1: 6}


def sample(backend, wanted) -> Result:
    """As a sampler's node does, where there is less memory than is likely needed."""
    request = Sample(wanted[0], "euler", 1.0, 7, tensors={"noise": torch.zeros(1, 4)})
    room = handle.host_room().keeping(handle.entries_to_keep(backend, wanted))
    return handle.in_room(backend, wanted, lambda: backend.sample(request, room=room))


def test_a_margin_leaves_the_other_expert_of_the_graph(gpus):
    """It takes what can be spared, such as a model of another graph."""
    run("/a", "/b")
    handles = [handle.load(CONFIG, name, "default") for name in ("/a", "/b")]
    assert [sample(gpus, each.wanted) for each in handles] == [Result()] * 2
    assert not gpus.client.unloads and gpus.client.held == ["/a", "/b"]
    run("/b")
    sample(gpus, handles[1].wanted)
    assert gpus.client.unloads == [Unload("/a", True, [0])]


def test_what_is_needed_to_run_at_all_takes_the_other_expert(gpus):
    run("/a", "/b")
    handles = [handle.load(CONFIG, name, "default") for name in ("/a", "/b")]
    gpus.client.room = 6
    assert sample(gpus, handles[0].wanted) == Result()
    assert gpus.client.unloads == [Unload("/b", True)]
    assert (held("/a"), held("/b")) == ({0: 6, 1: 6}, {0: 0, 1: 0})


def test_free_model_and_node_cache_leaves_nothing_in_host_memory(gpus):
    """ComfyUI unloads all models, and forgets what its nodes have made."""
    run("/a")
    first = handle.load(CONFIG, "/a", "default")
    management.unload_all_models()
    assert gpus.client.unloads == [Unload("/a", True)] and gpus.client.parked == ["/a"]
    del first
    gc.collect()
    assert gpus.client.unloads[1:] == [Unload("/a")] and not gpus.client.parked


def test_unload_models_parks_what_a_node_still_names(gpus):
    run("/a")
    first, second = (handle.load(CONFIG, "/a", "default") for _ in range(2))
    management.unload_all_models()
    del second
    gc.collect()
    assert gpus.client.parked == [first.path] and len(gpus.client.unloads) == 1


def test_room_for_others_leaves_weights_in_host_memory(gpus):
    """The next load may want them under another plan, of which the handle is another one."""
    run("/a")
    first = handle.load(CONFIG, "/a", "default")
    for device in (FIRST, SECOND):
        management.free_memory(20, device)
    del first
    gc.collect()
    assert gpus.client.unloads == [Unload("/a", True, [0]), Unload("/a", True, [1])]


@pytest.mark.parametrize("dtype, times", [(torch.float32, 0.5), (torch.bfloat16, 1.0)])
def test_a_lora_file_is_planned_as_ranks_hold_it(monkeypatch, tmp_path, dtype, times):
    """Two bytes for a number; a file that cannot be read counts whole, and is refused by who loads it."""
    path = tmp_path / "lora.safetensors"
    save_file({"up": torch.zeros(512, 64, dtype=dtype), "alpha": torch.tensor(4.0)}, path)
    monkeypatch.setattr(model_files.folder_paths, "get_full_path", lambda kind, name: str(path))
    assert model_files.lora_size("lora.safetensors") == pytest.approx(
        512 * 64 * dtype.itemsize * times, abs=400
    )
    path.write_bytes(b"no safetensors at all")
    assert model_files.lora_size("lora.safetensors") == 21
