"""What a client does with models on its backend's ranks: which it knows, and which it has unloaded."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from backend.client import pool
from backend.client.auto.model_choice import ModelChoice
from backend.client.launching.launcher import ClosedError
from backend.client.pool import Backend
from backend.config import ParallelConfig
from backend.protocol import BackendError, Describe, Load, Loaded, Result, Sample, Unload, Welcome

KEY = ModelChoice("/m.safetensors")


class Ranks:
    """In the client's place: ``names`` are those of the next loads, ``unloaded`` the answer to an Unload."""

    welcome = Welcome(2, "cuda", {}, [], ["GPU-0", "GPU-1"])
    closed = False
    waiting = None
    left = None
    late_reply = None

    def is_open(self) -> bool:
        return True

    def __init__(self, *names: str):
        self.names = list(names)
        self.received: list = []
        self.unloaded = {"freed": True, "left": [0, 1]}
        self.last_word = ""

    def request(self, message, *_, **__):
        self.received.append(message)
        return Loaded(self.names.pop(0), "flux") if isinstance(message, Load) else Result(self.unloaded)


def backend(*names: str) -> Backend:
    """One that has loaded a file under the first of the names."""
    found = Backend(ParallelConfig(address="tcp:host:1"), Ranks(*names))
    found.load(KEY[0])
    found.client.received.clear()
    return found


def test_the_predecessor_of_a_changed_file_is_unloaded():
    """Nobody else would: the handle of the file names its successor from now on."""
    ranks = backend("before", "after")
    ranks.load(KEY[0])
    assert ranks.client.received[1:] == [Unload("before")] and ranks.models == {KEY: "after"}


def test_what_an_interrupt_took_out_of_the_queue_is_still_known():
    """It stays on the ranks, and goes with the next load."""
    ranks = backend("before", "after", "after")
    answer = ranks.client.request

    def interrupt(message, *_, **__):
        if isinstance(message, Unload):
            raise KeyboardInterrupt
        return answer(message)

    ranks.client.request = interrupt
    with pytest.raises(KeyboardInterrupt):
        ranks.load("/other", keep=())
    assert ranks.models == {KEY: "before"}
    with pytest.raises(KeyboardInterrupt):
        ranks.load(KEY[0])
    ranks.client.request = answer
    ranks.load(KEY[0])
    assert ranks.client.received[2:] == [Unload("before")] and ranks.models == {KEY: "after"}


@pytest.mark.parametrize("name", ["same", "same+lora"])
def test_a_file_that_is_the_same_stays(name):
    """With other LoRAs too, whose weights are the same."""
    ranks = backend("same", name)
    ranks.load(KEY[0])
    assert [type(message) for message in ranks.client.received] == [Load] and ranks.models == {KEY: "same"}


def test_a_freed_model_is_forgotten():
    ranks = backend("m")
    assert ranks.unload(KEY, park=False) == [0, 1]
    assert ranks.client.received == [Unload("m", False)] and not ranks.models
    assert ranks.unload(KEY) == [] and len(ranks.client.received) == 1


def test_a_parked_model_is_still_known():
    """It comes back when it is sampled, from the ranks that it has left."""
    ranks = backend("m")
    ranks.client.unloaded = {"freed": False, "left": [1]}
    assert ranks.unload(KEY, ranks={1}) == [1]
    assert ranks.client.received == [Unload("m", True, [1])] and ranks.models == {KEY: "m"}


def test_nothing_is_unloaded_while_a_request_runs():
    """ComfyUI asks for room in the middle of one: to wait for its end would be for ever."""
    ranks = backend("m")
    ranks._busy = SimpleNamespace(
        acquire=lambda timeout=-1.0: pytest.fail("it waits") if timeout < 0 else False
    )
    assert ranks.unload(KEY) == []
    assert not ranks.client.received and ranks.models == {KEY: "m"}


def test_a_thread_that_looks_whether_the_ranks_live_keeps_no_model_there():
    """It holds the connection for a moment, as the side panel's does."""
    ranks = backend("m")
    looks = SimpleNamespace(acquire=lambda blocking=True, timeout=0.0: timeout > 0, release=lambda: None)
    ranks._busy = looks
    assert ranks.unload(KEY) == [0, 1]


@pytest.mark.parametrize("stats, is_done", [({}, True), ({"left": [], "freed": False}, False)])
def test_a_release_that_another_clients_request_prevents_says_so(stats, is_done):
    """It is answered at once, and no rank has forgotten anything: the client knows what is still there."""
    ranks = backend("m")
    ranks.client.unloaded = stats
    assert ranks.release(SimpleNamespace(shared_ranks=lambda _: [0])) == is_done


def test_a_backend_whose_launcher_has_ended_is_not_alive():
    """Nor one of which a rank is silent, though rank 0 still holds the connection."""
    ranks = backend("m")
    assert ranks.alive()
    ranks.process = SimpleNamespace(running=True)
    assert ranks.alive()
    ranks.process.running = False
    assert not ranks.alive()


def test_an_unload_leaves_the_backend_free_for_others():
    """Also of what is not loaded, and one that fails."""
    ranks = backend("m")
    ranks.unload(ModelChoice("/another"))
    ranks.client.unloaded = {}
    with pytest.raises(KeyError):
        ranks.unload(KEY)
    assert not ranks.is_busy


def test_a_backend_that_says_why_it_ends_is_quoted():
    """One that others started: its launcher has told every client, also those that wait for nothing."""
    ranks = backend("m")
    ranks.client.last_word = "rank 1 has been silent for 300 s."
    assert ranks.loss().endswith("has hung up since the last run: rank 1 has been silent for 300 s.")
    ranks.client.last_word = ""
    assert ranks.loss().endswith("has hung up since the last run.")


def test_a_wait_for_others_can_be_interrupted():
    """An Unload waits behind another client's request; what it did is noted before the interrupt goes on."""
    ranks = backend("m")
    asked = []

    def request(message, check, on_progress):
        check()
        asked.append(message)
        return Result(ranks.client.unloaded)

    def interrupt():
        raise KeyboardInterrupt

    ranks.client.request = request
    with pytest.raises(KeyboardInterrupt):
        ranks.unload(KEY, park=False, check=interrupt)
    assert asked == [Unload("m", False)] and not ranks.models and not ranks.is_busy


#: What may wait for another thread's request: with what is called ten times a second.
WAITS = {
    "load": lambda ranks, check: ranks.load(KEY[0], check=check),
    "load, keeping none": lambda ranks, check: ranks.load(KEY[0], keep=(), check=check),
    "describe": lambda ranks, check: ranks.describe(Describe("m", [1], 1, 1), check),
    "release": lambda ranks, check: ranks.release(SimpleNamespace(shared_ranks=lambda _: [0]), check),
    "become": lambda ranks, check: ranks.become(ParallelConfig(cfg_degree=2), check),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_for_another_threads_request_can_be_interrupted(what):
    """Which may take minutes; nothing has been sent yet, so the ranks stay."""
    ranks = backend("m", "m")
    asked = []

    def interrupt():
        asked.append(1)
        if len(asked) > 1:
            raise KeyboardInterrupt

    with ranks._busy, ThreadPoolExecutor() as threads:
        waits = threads.submit(WAITS[what], ranks, interrupt)
        with pytest.raises(KeyboardInterrupt):
            waits.result(60)
    assert not ranks.client.received and ranks.models == {KEY: "m"} and not ranks.is_busy


def test_a_sampling_that_waits_can_be_cancelled():
    ranks = backend("m")
    with ranks._busy, ThreadPoolExecutor() as threads:
        waits = threads.submit(ranks.sample, Sample("m", "euler", 1.0, 0), should_cancel=lambda: True)
        assert waits.result(60) is None
    assert not ranks.closed and not ranks.is_busy


@pytest.mark.parametrize("is_stopped", [True, False], ids=["Stop ranks", "Cancel"])
def test_a_sampling_that_was_ended_says_why_the_next_run_starts_afresh(caplog, is_stopped):
    """Where its call did not end in time; not where somebody has ended the ranks, or this process."""
    ranks = backend("m")
    ranks.process = SimpleNamespace(silence="", close=lambda: None, failure=lambda: ClosedError("closed"))

    def sample(*_):
        ranks.client.closed = True
        if is_stopped:
            raise BackendError("the connection was lost")

    ranks.client.sample = sample
    ranks.client.close = lambda: None
    assert ranks.sample(Sample("m", "euler", 1.0, 0)) is None and ranks.closed
    assert ["did not end in time" in each for each in caplog.messages] == [True] * (not is_stopped)


def test_a_run_that_waits_for_another_ones_launch_can_be_interrupted():
    def interrupt():
        raise KeyboardInterrupt

    with pool._lock, ThreadPoolExecutor() as threads:
        waits = threads.submit(pool.backend_for, ParallelConfig(device="cpu"), interrupt)
        with pytest.raises(KeyboardInterrupt):
            waits.result(60)


def test_ranks_that_end_have_ended_before_room_is_made_for_others(monkeypatch):
    """They may be on the same GPUs, whose memory was asked of ComfyUI's models while they still had it."""
    done = []

    def process(config, *_):
        done.append("start")
        raise KeyboardInterrupt

    before = ParallelConfig(cfg_degree=2, gpus="0,1", device="cuda")
    after = ParallelConfig(cfg_degree=2, gpus="1,2", device="cuda")
    found = Backend(before, Ranks(), SimpleNamespace(running=True, models=frozenset()))
    monkeypatch.setattr(found, "close", lambda: done.append("end"))
    monkeypatch.setattr(ParallelConfig, "resolve_device", lambda self, gpus: "cuda")
    monkeypatch.setattr(pool, "_folders", set())
    monkeypatch.setattr(pool, "_backends", {before.topology(): found})
    monkeypatch.setattr(pool, "BackendProcess", process)
    with pytest.raises(KeyboardInterrupt):
        pool.backend_for(after, make_room=lambda: done.append("room"))
    assert done == ["end", "room", "start"]


def test_ranks_that_go_on_need_no_room_for_a_start(monkeypatch):
    ranks = backend("m")
    monkeypatch.setattr(pool, "_backends", {ranks.config.topology(): ranks})
    assert pool.backend_for(ranks.config, make_room=lambda: pytest.fail("room")) is ranks
