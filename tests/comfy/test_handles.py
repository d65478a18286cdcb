"""Handles of models in a real ComfyUI's process, on ranks that are not there: their memory is a number."""

import gc
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules
from ranks_in_numbers import CONFIG, backend, run  # noqa: F401  # fixtures

with comfy_modules():
    import comfy.model_management as management
    from comfy_execution.utils import CurrentNodeContext
    from parallel_dit.backend.client import interrupts, pool
    from parallel_dit.backend.client.auto.model_choice import ModelChoice
    from parallel_dit.backend.config import ParallelConfig
    from parallel_dit.backend.hardware.device_memory import device_name
    from parallel_dit.backend.planner.auto_config import AutoConfig
    from parallel_dit.backend.protocol import Load, RefusedError, Result, Sample, Welcome
    from parallel_dit.nodes.host import handle, models_on_ranks
    from parallel_dit.nodes.host.rank_weights import RankWeights


def test_a_model_that_the_graph_no_longer_names_makes_room(backend):
    """It waits in host memory for its next prompt, whether ComfyUI's cache keeps its handle or not."""
    run("/a")
    first = handle.load(CONFIG, handle.ModelChoice("/a"))
    run("/b")
    second = handle.load(CONFIG, handle.ModelChoice("/b"))
    assert (backend.client.held, backend.client.parked) == (["/b"], ["/a"])
    run("/a")
    handle.ensure_loaded(first)
    assert (backend.client.held, backend.client.parked) == (["/a"], ["/b"])
    assert first.choice != second.choice


def test_models_of_a_graph_take_turns_where_they_do_not_fit_together(backend):
    """As Wan's two experts on GPUs where ComfyUI's manager makes no room: parked, they come back soon."""
    run("/a", "/b")
    first, second = (handle.load(CONFIG, handle.ModelChoice(name)) for name in ("/a", "/b"))
    assert (backend.client.held, backend.client.parked) == (["/b"], ["/a"])
    assert list(backend.models) == [first.choice, second.choice]
    handle.ensure_loaded(first)
    assert (backend.client.held, backend.client.parked) == (["/a"], ["/b"])


def test_a_model_that_fits_by_no_means_is_refused(backend):
    run("/a", "/b")
    first = handle.load(CONFIG, handle.ModelChoice("/a"))
    backend.client.room = 5
    with pytest.raises(RefusedError, match="nothing is loaded"):
        handle.load(CONFIG, handle.ModelChoice("/b"))
    assert (backend.client.held, backend.client.parked) == ([], [first.choice.path])


def test_a_request_takes_the_room_of_models_that_the_graph_does_not_name(backend):
    """The least recently used one first, and no more than it takes."""
    backend.client.room = 18
    names = ["/a", "/b", "/c"]
    run(*names)
    handles = [handle.load(CONFIG, handle.ModelChoice(name)) for name in names]
    handle.ensure_loaded(handles[0])
    backend.client.room = 12
    run("/c")
    request = Sample("/c", "euler", 1.0, 7, tensors={"noise": torch.zeros(1, 4)})
    result = models_on_ranks.run_evicting_models(
        backend,
        handles[2].choice,
        lambda room, all_ranks: backend.sample(request, all_ranks=all_ranks),
        lambda: None,
    )
    assert result == Result() and backend.client.held == ["/a", "/c"]


def test_the_other_model_of_a_graph_stays_without_a_handle(backend):
    """As under --cache-none, where ComfyUI drops the first expert's once it was sampled: it was read again
    in every prompt. One that the graph does not name leaves ranks that others use, too, into host memory."""
    backend.client.room = 12
    run("/a", "/b")
    for name in ("/a", "/b"):
        handle.load(CONFIG, handle.ModelChoice(name))  # which nothing keeps
    assert backend.client.held == ["/a", "/b"]
    assert {choice[0] for _, choice in models_on_ranks._weights} == {"/a", "/b"}  # ComfyUI may take both
    run("/b")
    gc.collect()
    handle.load(CONFIG, handle.ModelChoice("/b"))
    assert (backend.client.held, backend.client.parked) == (["/b"], ["/a"])
    assert {choice[0] for _, choice in models_on_ranks._weights} == {"/a", "/b"}


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
    loader = handle.ParallelDiT(LOADED, ModelChoice("/a"), None, None, auto=auto)
    found = handle.with_lora(loader, "/lora", 0.5)
    assert asked == [config] and found.config == config and found.loras == (("/lora", 0.5),)


def test_a_lora_of_a_model_that_no_rank_holds_has_the_plan_of_its_loader(backend, monkeypatch):
    backend.process = SimpleNamespace(running=True, models=pool._folders)
    monkeypatch.setattr(pool, "_backends", {SAMPLED.topology(): backend})
    loader = handle.ParallelDiT(LOADED, ModelChoice("/a"), None, None, auto=AutoConfig())
    assert handle._present_plan(loader) == LOADED


def test_weights_under_another_topology_are_not_listed_twice(backend):
    """Through the older entry ComfyUI would take the weights that the next request needs."""
    backend.client.welcome = Welcome(1, "cpu", {}, [], [device_name(torch.device("cpu"))])
    loaded = backend.client.request(Load("/a"))
    backend.models["/a", "default", "auto"] = "/a"
    configs = ParallelConfig(ulysses_degree=2), ParallelConfig(ring_degree=2)
    handles = [handle.ParallelDiT(config, ModelChoice("/a"), loaded, None) for config in configs]
    for each in handles:
        named = {(other.config.topology(), other.choice) for other in handles}
        models_on_ranks.register(each.config.topology(), each.choice, backend, loaded, named, handle.is_named)
    listed = [entry for entry in management.current_loaded_models if isinstance(entry.model, RankWeights)]
    assert len(listed) == 1 and models_on_ranks.entries_to_keep(backend, handles[1].choice) == listed


def test_models_of_a_sampling_stay_where_room_is_made(backend, monkeypatch):
    """Not what ComfyUI's flag says: it stays set on other devices, and goes for a guider's second MODEL."""
    used, encoder = (SimpleNamespace(model=object(), currently_used=flag) for flag in (False, True))
    monkeypatch.setattr(management, "current_loaded_models", [used, encoder])
    choice = ModelChoice("/a")
    assert models_on_ranks.entries_to_keep(backend, choice, (used.model,)) == [used]


def test_freeing_weights_frees_the_host_memory_of_parked_ones(backend):
    """ComfyUI's Unload Models leaves them there, which its cache and other programs may need."""
    backend.client.welcome = Welcome(1, "cpu", {}, [], [device_name(torch.device("cpu"))])
    run("/a")
    first = handle.load(CONFIG, handle.ModelChoice("/a"))
    (entry,) = models_on_ranks.entries_to_keep(backend, first.choice)
    entry.model.detach()
    assert (backend.client.held, backend.client.parked) == ([], ["/a"])
    assert models_on_ranks.free_weights() == 1 and not backend.client.parked and not backend.models
    assert models_on_ranks.free_weights() == 0
    handle.ensure_loaded(first)
    assert backend.client.held == ["/a"] and models_on_ranks.free_weights() == 1 and not backend.client.held


def test_weights_of_a_step_that_was_left_stay_at_the_end_of_its_graph(backend, monkeypatch):
    """Under --disable-smart-memory ComfyUI takes all models then: Cancel would wait for the step. A node that
    wants their memory waits."""
    backend.client.welcome = Welcome(1, "cpu", {}, [], [device_name(torch.device("cpu"))])
    run("/a")
    (entry,) = models_on_ranks.entries_to_keep(backend, handle.load(CONFIG, handle.ModelChoice("/a")).choice)
    waits = []
    monkeypatch.setattr(type(backend), "is_left", True)
    monkeypatch.setattr(models_on_ranks, "wait_for_left", waits.append)
    entry.model.detach()
    assert entry.model.held and not waits
    with CurrentNodeContext("p", "7"):
        entry.model.detach()
    assert not entry.model.held and waits == [backend]


def test_freeing_weights_has_a_deadline(backend, monkeypatch):
    """Nobody can press Cancel for the panel; ranks that do not answer end."""
    backend.client.welcome = Welcome(1, "cpu", {}, [], [device_name(torch.device("cpu"))])
    run("/a")
    first = handle.load(CONFIG, handle.ModelChoice("/a"))
    assert models_on_ranks.entries_to_keep(backend, first.choice)
    monkeypatch.setattr(interrupts, "PATIENCE", 0.0)

    def request(message, check, on_progress):
        for _ in range(600):
            check()
            time.sleep(0.1)
        pytest.fail("it waits for ever")

    monkeypatch.setattr(backend.client, "request", request)
    with pytest.raises(interrupts.DeadlineError, match="ranks have freed nothing for 0 s"):
        models_on_ranks.free_weights(interrupts.deadline(0.0, "ranks have freed nothing"))
    assert not any(entry.held for _, found in models_on_ranks._weights.values() for entry in found)
