"""Handles of models on stand-ins for ComfyUI: which models stay on the ranks, and when room is made."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from handles_in_numbers import Interrupted, handles, run

from backend import protocol
from backend.client.launching.launcher import ClosedError


@pytest.fixture
def host():
    """Modules of nodes/host on stand-ins (handles_in_numbers.py)."""
    with handles() as found:
        yield found


def test_room_for_other_ranks_is_made_once_those_that_end_have_ended(host, monkeypatch):
    """A change of GPUs: ComfyUI's models left for what the ranks that were about to end still had."""
    done = []
    config = host.handle.ParallelConfig(cfg_degree=2, gpus="1,2", device="cuda")
    before = host.handle.ParallelConfig(cfg_degree=2, gpus="0,1", device="cuda")
    process = SimpleNamespace(running=True, models=frozenset(), close=lambda: done.append("end"))
    client = SimpleNamespace(closed=False, is_open=lambda: True, close=lambda: None)
    host.pool._backends[before.topology()] = host.pool.Backend(before, client, process)

    def start(*_):
        done.append("start")
        raise KeyboardInterrupt

    room = SimpleNamespace(make_for_start=lambda gpus: done.append(gpus))
    monkeypatch.setattr(host.handle, "host_room", lambda: room)
    monkeypatch.setattr(host.handle, "check_headers", lambda *_: None)
    monkeypatch.setattr(host.handle.ParallelConfig, "resolve_device", lambda self, gpus: "cuda")
    monkeypatch.setattr(host.pool, "_folders", set())
    monkeypatch.setattr(host.pool, "BackendProcess", start)
    with pytest.raises(KeyboardInterrupt):
        host.handle.load(config, host.handle.ModelChoice("/a"))
    assert done == ["end", [1, 2], "start"]


def test_a_node_says_that_it_waits_for_another_client(host):
    """Also once Cancel is pressed, and no longer once its request has begun."""
    status = host.progress.NodeStatus()
    shown = []
    status.send = shown.append
    backend = SimpleNamespace(
        wait_line="waiting for another client's request, 2 steps left",
        step_line="",
        client=SimpleNamespace(waiting=None),
    )
    assert not status.interrupted(backend=backend) and not status.interrupted(backend=backend)
    backend.wait_line = ""
    status.interrupted(backend=backend)
    status.show("step 1/2")
    assert not status.interrupted(backend=backend)
    backend.wait_line = "waiting for another client's request"
    host.management.processing_interrupted = lambda: True
    assert status.interrupted(backend=backend)
    first = "waiting for another client's request, 2 steps left"
    assert shown == [first, "", "step 1/2", backend.wait_line, host.progress.CANCELLING]


@pytest.mark.parametrize("warning", ["", "The LoRA is held a second time."])
def test_comfyuis_own_lora_loaders_show_the_note_and_what_a_lora_costs(host, warning, monkeypatch):
    """A note alone, too: the line of an earlier file stayed under the node."""
    info = {"notes": ["of another one", "LoRA on 1 layer"], "warnings": ["", warning], "weights": {}}
    info |= {"parts": {}, "lora_bytes": [0, 0, 0]}
    module, sent = host.remote_patcher, []
    dit = SimpleNamespace(loaded=SimpleNamespace(info=info), config=SimpleNamespace(address=""))
    monkeypatch.setattr(module, "with_lora", lambda *_: dit)
    monkeypatch.setattr(module, "node_text", lambda: sent.append)
    monkeypatch.setattr(
        module.stock_loras, "write", lambda patches, *others: "/lora" if "a" in patches else None
    )
    patcher = module.RemotePatcher(None, None, None)
    patcher.get_attachment = lambda key: (dit, {})
    patcher.set_attachments = lambda key, value: None
    assert patcher.add_patches({"a": 1}, 0.5) == ["a"]
    assert sent == ["LoRA on 1 layer" + f"\n{warning}" * bool(warning)]
    patcher.add_patches({"a": 1}, 0.0)
    patcher.add_patches({"of a text encoder": 1}, 0.5)
    assert sent[1:] == [
        "strength 0: nothing is added to the transformer",
        "nothing of it is for the transformer",
    ]


class Ranks:
    """In a client's place: one rank with room for ``room`` models on its device; ``reads``: of files."""

    def __init__(self, host, room: int):
        name = host.rank_weights.device_name(torch.device("cpu"))
        self.welcome = protocol.Welcome(1, "cuda", {}, [], [name])
        self.room = room
        self.closed = False
        self.waiting = self.timer = None
        self.late_reply = None
        self.left = None
        self.withdrawn = False
        self.reads: list[str] = []
        self.held: list[str] = []
        self.parked: list[str] = []
        self.unloads: list = []

    def is_open(self) -> bool:
        return True

    def request(self, message, *_):
        if isinstance(message, protocol.Unload):
            return self.unload(message)
        if message.path not in (*self.held, *self.parked):
            if len(self.held) == self.room:
                error = protocol.RefusedError("rank 0 lacks memory.")
                error.lacking = {0: 1}
                raise error
            self.reads.append(message.path)
            self.held.append(message.path)
        ranks = [{"weight_bytes": 10**9, "text": ""}]
        info = {"ranks": ranks, "warnings": [], "device": "cuda"}
        return protocol.Loaded(message.path, "flux", info)

    def unload(self, message):
        self.unloads.append(message)
        for names in (self.held, self.parked):
            names[:] = [name for name in names if name != message.model]
        self.parked += [message.model] * message.park
        return protocol.Result({"left": [0], "freed": not message.park, "dropped": []})


def on_ranks(host, room: int, is_ours: bool = True):
    """Have a backend on Ranks, launched by this ComfyUI or used by others, too; return it and its config."""
    config = host.handle.ParallelConfig(address="" if is_ours else "tcp:host:1")
    process = SimpleNamespace(running=True, models=host.pool._folders, close=lambda: None)
    backend = host.pool.Backend(config, Ranks(host, room), process if is_ours else None)
    backend.client.close = lambda: None
    host.pool._backends[config.topology()] = backend
    host.handle.measurements = SimpleNamespace(note_load_rate=lambda *_: None)
    return backend, config


def prompt(host, config, *names: str):
    """Queue a graph that loads these models; the cache drops the handles of others."""
    run(host, *names)
    return [host.handle.load(config, host.handle.ModelChoice(name)) for name in names]


def test_graphs_that_alternate_read_each_model_once(host):
    """Its file was read again in every prompt, although both fit: their handles go with each prompt."""
    backend, config = on_ranks(host, room=2)
    for _ in range(3):
        prompt(host, config, "/a")
        prompt(host, config, "/b")
    assert backend.client.reads == ["/a", "/b"] and not backend.client.unloads


def test_a_model_of_another_graph_is_parked_once_memory_lacks_the_oldest_first(host):
    backend, config = on_ranks(host, room=2)
    for name in ("/a", "/b", "/a", "/c"):
        prompt(host, config, name)
    unload = protocol.Unload
    spare = ["/b", "/a"]  # the least recently used one goes first, on the device and in host memory
    assert backend.client.unloads == [unload("/b", True, waits=True, yields=spare)]
    assert backend.client.held == ["/a", "/c"] and backend.client.reads == ["/a", "/b", "/c"]


def test_a_model_that_is_parked_leaves_no_second_time(host):
    """Ranks of another machine, of which ComfyUI's manager knows nothing: each load sent it off again, and
    said so. Once it is used, it may leave again."""
    backend, config = on_ranks(host, room=1)
    backend.client.welcome = replace(backend.client.welcome, devices=["GPU-of-another-machine"])
    for name in ("/a", "/b", "/c"):
        prompt(host, config, name)
    assert [each.model for each in backend.client.unloads] == ["/a", "/b"]
    first = next(iter(backend.models))
    use = partial(backend.client.held.append, first.path)
    host.models_on_ranks.run_evicting_models(backend, first, lambda room, all_ranks: use(), lambda: None)
    backend.client.room = 2
    prompt(host, config, "/d")
    assert [each.model for each in backend.client.unloads[2:]] == ["/a"]


def test_a_parked_model_that_another_client_has_brought_back_leaves_again(host):
    backend, config = on_ranks(host, room=1, is_ours=False)
    for name in ("/a", "/b"):
        prompt(host, config, name)
    backend.client.held.append("/a")
    backend.client.held.remove("/b")
    prompt(host, config, "/c")
    assert [each.model for each in backend.client.unloads] == ["/a", "/b", "/a"]
    assert backend.client.held == ["/c"]


def test_what_ranks_have_dropped_is_forgotten(host):
    backend, config = on_ranks(host, room=3)
    for name in ("/a", "/b", "/c"):
        prompt(host, config, name)
    answer = protocol.Result({"left": [0], "freed": False, "dropped": ["/a"]})
    backend.client.unload = lambda message: answer
    choices = list(backend.models)
    (entry,) = host.models_on_ranks._entries(backend, choices[:1])
    assert entry.held
    assert host.models_on_ranks.unload(backend, choices[1]) == [0] and list(backend.models) == choices[1:]
    assert not entry.held  # else ComfyUI's manager would take it to make room


def test_ranks_of_others_have_a_model_of_another_graph_parked_and_once_alone(host):
    """They would lack its memory; a warm run costs no message more."""
    backend, config = on_ranks(host, room=2, is_ours=False)
    for name in ("/a", "/b", "/b"):
        prompt(host, config, name)
    assert [each.model for each in backend.client.unloads] == ["/a"] and backend.client.parked == ["/a"]
    prompt(host, config, "/a")
    assert [each.model for each in backend.client.unloads] == ["/a", "/b"]
    assert backend.client.reads == ["/a", "/b"]


@pytest.mark.parametrize("graph, parks", [("/a", False), ("/b", True)])
def test_unload_models_frees_what_no_graph_needs(host, graph, parks):
    """The last graph's stays in host memory, also where no handle is left."""
    backend, config = on_ranks(host, room=2)
    for name in ("/b", graph):
        prompt(host, config, name)
    (found,) = [each for (_, key), (_, each) in host.models_on_ranks._weights.items() if key.path == "/b"]
    found[0].all_go = True
    assert found[0].free_weights()
    assert backend.client.parked == ["/b"] * parks and backend.client.unloads[0].park == parks


def test_on_cpus_models_of_other_graphs_stay_within_half_of_free_memory(host, monkeypatch):
    """Nothing parks there."""
    backend, config = on_ranks(host, room=9)
    backend.client.welcome = replace(backend.client.welcome, device="cpu")
    monkeypatch.setattr(host.models_on_ranks, "host_free", lambda swap: 2 * 10**9)
    for name in ("/a", "/b", "/c", "/d", "/e"):
        prompt(host, config, name)
    assert backend.client.held == ["/c", "/d", "/e"] and not backend.client.parked


def killed_in_unload(host, room: int):
    """Have a backend as on_ranks, of which a rank is killed in the next Unload; return it and its config."""
    backend, config = on_ranks(host, room)
    error = protocol.BackendError
    process = backend.process

    def end():
        backend.client.closed = True
        raise error("the connection was lost")

    def request(message, *_):
        return end() if backend.client.closed else asked(message)

    def failure():
        return ClosedError("closed") if process.closing else error("rank 1 was killed by SIGKILL.")

    asked = backend.client.request
    backend.client.request = request
    backend.client.unload = lambda message: end()
    backend.client.close = lambda: vars(backend.client).update(closed=True)
    process.closing, process.failure = False, failure
    process.close = lambda: vars(process).update(closing=True, running=False)
    return backend, config


def test_a_rank_that_dies_while_a_model_parks_is_the_reason(host):
    """The run ended as if somebody had cancelled it: the request after the Unload found a backend that was
    closed by ourselves."""
    backend, config = killed_in_unload(host, room=1)
    prompt(host, config, "/a")
    with pytest.raises(protocol.BackendError, match="rank 1 was killed by SIGKILL"):
        prompt(host, config, "/b")
    assert backend.closed and backend.process.closing


def test_ranks_that_die_as_weights_are_freed_are_no_success(host):
    """Free weights said how many it had freed."""
    backend, config = killed_in_unload(host, room=2)
    prompt(host, config, "/a")
    with pytest.raises(protocol.BackendError, match="rank 1 was killed by SIGKILL"):
        host.models_on_ranks.free_weights()


def test_a_backend_that_was_stopped_is_no_failure(host):
    """Whoever asks it afterwards is interrupted, and says nothing."""
    backend, config = killed_in_unload(host, room=1)
    prompt(host, config, "/a")
    backend.close()
    with pytest.raises(host.handle.ClosedError):
        backend._request(protocol.Ping())
    assert host.models_on_ranks.free_weights() == 0


def test_an_unload_that_waits_for_another_client_says_so_and_can_be_cancelled(host):
    """It queues behind a long sample of another ComfyUI: nothing was shown, Cancel waited for 20 s, hung up,
    and the ranks freed this client's models. One that left the queue has taken nothing from the ranks."""
    backend, config = on_ranks(host, room=1, is_ours=False)
    (before,) = prompt(host, config, "/a")
    client = backend.client
    shown = []

    def request(message, check, on_progress):
        if not isinstance(message, protocol.Unload):
            return asked(message)
        client.waiting = protocol.Waiting("Sample", 1, 4)
        client.waits_since = 0.0
        try:
            check()
            host.management.processing_interrupted = lambda: True
            host.management.throw_exception_if_processing_interrupted = interrupt
            check()
        except Interrupted:
            client.withdrawn = True
            raise

    def interrupt():
        raise Interrupted

    asked = client.request
    client.request = request
    host.progress.node_text = lambda: shown.append
    run(host, "/a", "/b")  # so "/a" does not make way before
    with pytest.raises(Interrupted):
        host.handle.load(config, host.handle.ModelChoice("/b"))
    assert "waiting for another client's request, 3 steps left" in shown and not backend.closed
    (entry,) = host.models_on_ranks._entries(backend, {before.choice})
    assert entry.held and before.choice in backend.models
