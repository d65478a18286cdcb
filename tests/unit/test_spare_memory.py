"""How much memory weights may stay dequantized in, and when it goes back to others."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_memory import GB, FakeMemory, on_ranks
from tiny import batch_request

from backend.client.launching.rank_environment import sanitized_environment
from backend.config import ParallelConfig
from backend.parallel import mesh
from backend.planner.memory import LEFT_FREE, SPARE, spare_bytes
from backend.quantization import dequantized_cache as cache_module
from backend.quantization.dequantized_cache import (
    CACHE_VARIABLE,
    may_cache_dequantized,
    stop_caching_dequantized,
)
from backend.rank import admission as admission_module
from backend.rank.admission import Admission, InsufficientMemory, RankMemory
from backend.rank.worker import Worker
from backend.rank_plan.need import Need
from backend.sampling.runs import Prepared
from backend.sampling.step_loop import Callbacks, RequestCancelled
from backend.serving.step_times import StepClock


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Also after tests whose ranks ran out of memory."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(cache_module, "_have_run_out", False)


def spare(rooms: list[RankMemory], memories: list[FakeMemory], weights: int = 0) -> list[int]:
    """What each rank of a model of so many bytes may take."""
    report = SimpleNamespace(weight_bytes=weights)
    prepared = Prepared(cast(Any, SimpleNamespace(report=report)), cast(Any, None))

    def act(rank, control, memory):
        return Admission(ParallelConfig(), control, memory)._spare(rooms, prepared)

    return on_ranks(memories, act)[0]


def room(rank: int, memory: str, free: int, likely: int, cached: int = 0) -> RankMemory:
    return RankMemory(rank, memory, Need(0, likely * GB), free * GB, cached * GB)


def test_most_of_what_nobody_needs_is_spare():
    """Of each GPU its own, and what the rank's own allocator has."""
    rooms = [room(0, "a", 12, 2), room(1, "b", 12, 4, cached=6)]
    found = spare(rooms, [FakeMemory(0)] * 2)
    assert found == [SPARE * 10 * GB - LEFT_FREE, SPARE * 14 * GB - LEFT_FREE]
    assert spare([room(0, "a", 2, 3)], [FakeMemory(0)]) == [0]


def test_a_request_that_needs_much_may_need_more():
    """A quarter of what it likely needs stays free for it."""
    assert spare([room(0, "a", 50, 40)], [FakeMemory(0)]) == [0]
    assert spare([room(0, "a", 53, 40)], [FakeMemory(0)]) == [3 * GB]


def test_ranks_of_one_gpu_share_it():
    """What the allocator of one has cached is of no use to the other, which likely needs what is free."""
    both = spare([room(0, "a", 20, 3), room(1, "a", 20, 5)], [FakeMemory(0)] * 2)
    assert both == [spare_bytes(6 * GB, 3 * GB), spare_bytes(5 * GB, 5 * GB)]
    cached = spare([room(0, "a", 2, 1, cached=5), room(1, "a", 2, 1)], [FakeMemory(0)] * 2)
    assert cached[1] == 0


def test_on_the_cpu_neither_swap_nor_the_models_pages_are_spare(monkeypatch):
    monkeypatch.setattr(admission_module, "host_free", lambda swap: 100 * GB if swap else 9 * GB)
    found = spare([room(0, "ram", 100, 1)], [FakeMemory(0, kind="cpu")], weights=4 * GB)
    assert found == [spare_bytes(4 * GB, GB)]


def test_what_is_admitted_knows_what_is_spare():
    ready = Prepared(cast(Any, None), cast(Any, None))

    def act(rank, control, memory):
        admission = Admission(ParallelConfig(), control, memory)
        return admission.prepare(batch_request(1), lambda: ready, frozenset(), None)

    found, _ = on_ranks([FakeMemory(12 * GB, name=name) for name in ("a", "b")], act)
    assert [each.spare for each in found] == [spare_bytes(12 * GB, 0)] * 2


def worker_of(memory: FakeMemory, dequantized: int, sample) -> Worker:
    """One rank whose model lends so much and samples so."""
    worker = Worker.__new__(Worker)
    prepared = Prepared(cast(Any, SimpleNamespace(dequantized_bytes=dequantized)), cast(Any, None), spare=GB)
    worker.engine = cast(Any, SimpleNamespace(memory=memory, sample=sample, prepare_sample=print))
    worker.mesh, worker._admitted = mesh.single(), lambda *_: prepared
    worker.clock = StepClock(None)
    control = SimpleNamespace(all_gather_object=lambda own: [own], rank=0)
    worker.admission = Admission(ParallelConfig(), cast(Any, control), cast(Any, memory))
    return worker


@pytest.mark.parametrize("dequantized", [0, GB])
def test_after_memory_ran_out_next_to_them_nothing_is_spare(dequantized):
    """One rank goes on, and runs the same request again with all of its memory."""

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker = worker_of(FakeMemory(0), dequantized, fails)
    ready, rooms = Prepared(cast(Any, None), cast(Any, None)), [room(0, "a", 12, 2)]
    assert worker.admission._spare(rooms, ready) > 0
    with pytest.raises(InsufficientMemory):
        worker.run_sample(replace(batch_request(1), shared_ranks=[]), Callbacks())
    assert (worker.admission._spare(rooms, ready) > 0) == (not dequantized)


def test_ranks_after_those_that_ran_out_lend_nothing(monkeypatch):
    """Several ranks end, and their client starts the next ones."""
    assert may_cache_dequantized() and CACHE_VARIABLE not in sanitized_environment(
        dict(os.environ), ParallelConfig(), "cpu"
    )
    stop_caching_dequantized()
    assert (
        not may_cache_dequantized()
        and sanitized_environment(dict(os.environ), ParallelConfig(), "cpu")[CACHE_VARIABLE] == "0"
    )
    assert CACHE_VARIABLE not in os.environ  # with which ComfyUI starts itself again
    control = SimpleNamespace(all_gather_object=lambda own: [own], rank=0)
    admission = Admission(ParallelConfig(), cast(Any, control), cast(Any, FakeMemory(0)))
    ready = Prepared(cast(Any, None), cast(Any, None))
    assert admission._spare([room(0, "a", 12, 2)], ready) == 0


@pytest.mark.parametrize("dequantized, device, released", [(GB, "cuda", 1), (0, "cuda", 0), (GB, "cpu", 0)])
@pytest.mark.parametrize("stops", [False, True])
def test_what_stayed_goes_back_to_other_programs(dequantized, device, released, stops):
    """After a request, also one that was cancelled; where nothing stayed the memory stays the rank's. On a
    CPU what is large goes back by itself."""

    def sample(*_):
        if stops:
            raise RequestCancelled(1)

    worker = worker_of(FakeMemory(0, cached=8 * GB), dequantized, sample)
    worker.mesh = replace(worker.mesh, device=torch.device(device))
    message = replace(batch_request(1), shared_ranks=[])
    if stops:
        with pytest.raises(RequestCancelled):
            worker.run_sample(message, Callbacks())
    else:
        worker.run_sample(message, Callbacks())
    assert worker.engine.memory.released == released
