"""Handles of models in a real ComfyUI's process, on ranks that are not there: their memory is a number."""

import pytest
import torch
from comfy_modules import comfy_modules

with comfy_modules():
    import comfy.model_management as management
    from comfy_execution.graph import DynamicPrompt
    from comfy_execution.progress import reset_progress_state
    from parallel_dit.backend.client import pool
    from parallel_dit.backend.config import ParallelConfig
    from parallel_dit.backend.device_memory import device_name
    from parallel_dit.backend.protocol import Load, Loaded, RefusedError, Result, Sample, Unload, Welcome
    from parallel_dit.nodes.host import graph, handle
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
            return None
        if message.path not in self.held:
            self.refuse_without(6)
            self.parked = [name for name in self.parked if name != message.path]
            self.held.append(message.path)
        return Loaded(message.path, "flux", {"ranks": [{"weight_bytes": 6, "text": "rank 0"}]})

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
    assert len(listed) == 1 and handle.entries_to_keep(handles[1]) == listed


def test_freeing_weights_frees_the_host_memory_of_parked_ones(backend):
    """ComfyUI's Unload Models leaves them there, which its cache and other programs may need."""
    backend.client.welcome = Welcome(1, "cpu", {}, [], [device_name(torch.device("cpu"))])
    run("/a")
    first = handle.load(CONFIG, "/a", "default")
    (entry,) = handle.entries_to_keep(first)
    entry.model.detach()
    assert (backend.client.held, backend.client.parked) == ([], ["/a"])
    assert handle.free_weights() == 1 and not backend.client.parked and not backend.models
    assert handle.free_weights() == 0
    handle.ensure_loaded(first)
    assert backend.client.held == ["/a"] and handle.free_weights() == 1 and not backend.client.held
