"""Stale keys and values continued along the last two steps: K + r (K - K_prev)."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backend.parallel.attention.kv_buffers import KVBuffers
from backend.sampling.solver_registry import Evaluation
from backend.sampling.step_loop import _ratio


class Launches(TorchDispatchMode):
    """The names of operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


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


def test_later_evaluations_launch_no_other_kernels():
    """The first launch of one may wait for the device, where this rank receives ahead by then."""
    launched = []
    for evaluation in (1, 2):
        buffers = KVBuffers(1, extrapolate=True)
        for earlier in range(evaluation):
            write(buffers, earlier, 1.0, slice(0, TOKENS if earlier == 0 else 1), 0.0)
        with Launches() as kernels:
            write(buffers, evaluation, 2.0, slice(0, 1), 0.5)
        launched.append(kernels.names)
    assert launched[1] <= launched[0] and "aten.mul_.Tensor" in launched[1]


def test_the_ratio_is_of_steps_in_sigma():
    """A solver's second evaluation at the same sigma, then, is no step to continue."""
    plan = [
        Evaluation(torch.tensor(sigma), step) for step, sigma in enumerate((1.0, 0.75, 0.25, 0.25, 0.125))
    ]
    assert [_ratio(plan, index) for index in range(5)] == [0.0, 0.0, 2.0, 0.0, 0.0]
    assert _ratio(plan[1:3] + plan[4:], 2) == 0.25
