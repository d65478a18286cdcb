"""Stale keys and values continued along the last two steps: K + r (K - K_prev)."""

from types import SimpleNamespace

import pytest
import torch
from moved_bytes import MovedBytes

from backend.parallel import attention_hook, comm
from backend.parallel.kv_buffers import KVBuffers
from backend.parallel.mesh import ALONE, Axis
from backend.parallel.sequence import SequenceLengths, patches, whole_sequence
from backend.sampling.solver_registry import Evaluation
from backend.sampling.step_loop import _ratio

TOKENS, WHERE = 4, ("positive", 0, 0)


def write(buffers: KVBuffers, evaluation: int, value: float, tokens: slice, ratio: float) -> list[float]:
    """Write ``value`` for some ``tokens`` of an evaluation; the keys that attention then reads."""
    buffers.begin_evaluation(ratio)
    fresh = torch.full((1, 1, tokens.stop - tokens.start, 1), value)
    context = SimpleNamespace(evaluation=evaluation, samples=slice(None))
    keys, values = buffers.refresh(WHERE, (fresh, -fresh), tokens, TOKENS, context)
    assert values.equal(-keys)
    return keys.flatten().tolist()


def stale(ratio: float, extrapolate: bool = True) -> tuple[KVBuffers, list[float]]:
    """Keys 1 and then 2 for all tokens, and at the third evaluation 9 for the first: what is read there."""
    buffers = KVBuffers(1, extrapolate)
    write(buffers, 0, 1.0, slice(0, TOKENS), 0.0)
    assert write(buffers, 1, 2.0, slice(0, TOKENS), 0.0) == [2.0] * TOKENS
    return buffers, write(buffers, 2, 9.0, slice(0, 1), ratio)


@pytest.mark.parametrize("ratio, read", [(0.5, 2.5), (0.0, 2.0), (1.0, 3.0), (5.0, 3.0), (-1.0, 2.0)])
def test_stale_keys_go_on_along_the_last_two_steps(ratio, read):
    """At most as far again as the last step went, and never back."""
    assert stale(ratio)[1] == [9.0] + [read] * (TOKENS - 1)


def test_reused_keys_stay_as_they_are():
    assert stale(0.5, extrapolate=False)[1] == [9.0, 2.0, 2.0, 2.0]


def test_later_patches_of_an_evaluation_move_nothing():
    """And the next evaluation goes on from what was written, fresh or extrapolated."""
    buffers, _ = stale(0.5)
    assert write(buffers, 2, 8.0, slice(1, 2), 0.5) == [9.0, 8.0, 2.5, 2.5]
    assert write(buffers, 3, 0.0, slice(3, 4), 0.5) == [9 + 3.5, 8 + 3.0, 2.75, 0.0]


def test_one_step_makes_no_line():
    """Before a second one, keys are read as they were."""
    buffers = KVBuffers(1, extrapolate=True)
    write(buffers, 0, 1.0, slice(0, TOKENS), 0.0)
    assert write(buffers, 1, 5.0, slice(0, 1), 0.5) == [5.0, 1.0, 1.0, 1.0]
    assert write(buffers, 2, 6.0, slice(0, 1), 0.5) == [6.0, 1.0, 1.0, 1.0]


def test_the_ratio_is_of_steps_in_sigma():
    """A solver's second evaluation at the same sigma, then, is no step to continue."""
    plan = [
        Evaluation(torch.tensor(sigma), step) for step, sigma in enumerate((1.0, 0.75, 0.25, 0.25, 0.125))
    ]
    assert [_ratio(plan, index) for index in range(5)] == [0.0, 0.0, 2.0, 0.0, 0.0]
    assert _ratio(plan[1:3] + plan[4:], 2) == 0.25


@pytest.mark.parametrize("extrapolate", [False, True])
def test_a_ring_writes_each_ranks_tokens_where_they_stand(extrapolate, monkeypatch):
    """Of whole steps, and then of a patch. They are read once and written once; own ones once more, which are
    stacked to be sent."""
    sequence = SequenceLengths(text=5, image=12, text_position="first")
    ring = Axis(None, 0, 2, (0, 1))
    mesh = SimpleNamespace(ring=ring, ulysses=ALONE, sp=ring)
    attention = attention_hook.Attention(mesh)
    buffers = KVBuffers(1, extrapolate)
    torch.manual_seed(0)
    wanted = torch.empty(2, 1, 2, 17, 4)
    shards = [whole_sequence(sequence, sp_size=2), whole_sequence(sequence, sp_size=2)]
    shards.append(patches(sequence, 2, sp_size=2)[1])
    for evaluation, tokens in enumerate(shards):
        of_ranks = [torch.randn(2, 1, 2, count, 4) for count in tokens.lengths("joint")]
        for rank, each in enumerate(of_ranks):
            wanted[:, :, :, tokens.positions("joint", range(rank, rank + 1))] = each
        monkeypatch.setattr(comm, "all_gather", lambda x, *_, sent=of_ranks: [x, sent[1]])
        context = SimpleNamespace(evaluation=evaluation, samples=slice(None))
        call = SimpleNamespace(tokens=tokens, context=context)
        given = (call, buffers, of_ranks[0].unbind(), "joint", WHERE)
        attention._refresh(*given)  # which finds the positions
        with MovedBytes() as moved:
            found = attention._refresh(*given)
    assert all(map(torch.equal, found, wanted))  # no step in sigma: stale tokens stay as they are
    if not extrapolate:
        assert moved.bytes == 2 * of_ranks[0].nbytes + 2 * sum(each.nbytes for each in of_ranks)
