"""When a client hears of its Cancel, and other ranks do. No peers, and no GPU."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_memory import FakeMemory

from backend.protocol import Cancelled, ModelCall, Sample
from backend.rank.leader import Leader
from backend.sampling import step_loop
from backend.sampling.solver_registry import Evaluation
from backend.sampling.step_loop import Callbacks, Denoiser, RequestCancelled
from backend.serving.step_times import StepClock


@pytest.fixture
def leader() -> Any:
    """Rank 0 whose every request is cancelled in its second step."""

    def cancelled(*_):
        raise RequestCancelled(2)

    model = SimpleNamespace(parked_on=frozenset(), dequantized_bytes=0)
    rank: Any = Leader.__new__(Leader)
    rank.mesh = SimpleNamespace(rank=0, world_size=1)
    rank.control = SimpleNamespace(broadcast=lambda message: None)
    rank.clock = StepClock(None)
    rank.called = set()
    rank._admitted = lambda *_: SimpleNamespace(model=model)
    rank.engine = SimpleNamespace(memory=FakeMemory(0), sample=cancelled, prepare_sample=print)
    return rank


def test_a_client_hears_of_its_cancel_before_memory_goes_back(leader):
    """To give it back a rank waits for what its GPU still computes, up to a step of minutes. A client that
    plans meanwhile is told what the rank has."""
    order = []
    leader.clock.note_memory = order.append
    leader.engine.memory.bytes_cached = 7
    leader.engine.memory.release = lambda: order.append("released")
    job = SimpleNamespace(reply=order.append, cancelled=threading.Event())
    message = Sample("m", "euler", 1.0, 7, shared_ranks=[0], tensors={"sigmas": torch.ones(3)})
    leader.sample(job, message, None)
    assert order == [7, Cancelled(2), "released"]


@pytest.mark.parametrize("compile, steps", [("blocks", {0, 1, 2, 3, 4, 5}), ("off", set())])
def test_a_rank_says_in_which_steps_of_a_request_it_compiles(leader, compile, steps):
    """The first, and the first of PipeFusion's patches, and those that a host may be ahead."""
    message = Sample("m", "euler", 1.0, 7, warmup_steps=3, compile=compile)
    with pytest.raises(RequestCancelled):
        leader.run_sample(message, Callbacks())
    assert set(leader.clock.compiling) == steps
    leader.engine = SimpleNamespace(prepare_call=print, forward=lambda *_: None)
    leader._guarded = lambda act: act()
    found = []
    for name, asked in (("m", "off"), ("m", compile), ("m", compile), ("m+lora", compile)):
        leader.run_call(ModelCall(name, compile=asked, tensors={}))
        found.append(set(leader.clock.compiling))
    first = {0} if steps else set()
    assert found == [set(), first, set(), first]


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_rank_waits_for_what_rank_0_says_of_a_cancel(rank, cancelled, monkeypatch):
    """One that goes on would wait for ever for those that have stopped."""

    def broadcast(flag, source, group, async_op):
        return SimpleNamespace(wait=lambda: flag.fill_(cancelled), is_completed=lambda: True)

    monkeypatch.setattr(step_loop.dist, "broadcast", broadcast)
    denoiser: Any = Denoiser.__new__(Denoiser)
    denoiser.mesh = SimpleNamespace(rank=rank, control="of all ranks")
    denoiser.callbacks = Callbacks(should_stop=lambda: True)  # nobody asks this rank
    denoiser.runner = SimpleNamespace(drain=lambda: None)
    denoiser.outputs, denoiser.stop_broadcasts = None, []
    with pytest.raises(RequestCancelled, match="at step 3") if cancelled else nullcontext():
        denoiser._broadcast_stop(Evaluation(torch.tensor(0.5), 3))
