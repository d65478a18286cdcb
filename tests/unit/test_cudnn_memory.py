"""The copies that cuDNN's attention is given, in dry runs of released models: within what a plan counts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import dry_run
import meta_device
from scaling_page import plans_of

from backend.parallel.attention import kernel_table
from backend.rank_plan.need import request_need


@pytest.fixture
def contiguous(monkeypatch):
    """Have attention make its whole output; return whether what cuDNN was given was contiguous, by call."""
    calls = []

    def attend(query, key, value, *_, **__):
        batch, heads, tokens, _ = query.shape
        return query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)

    def by_cudnn(query, key, value, *, scale):
        calls.append(all(each.is_contiguous() for each in (query, key, value)))
        return attend(query, key, value)

    monkeypatch.setattr(meta_device, "_attend", attend)
    monkeypatch.setattr(kernel_table, "SDPA", by_cudnn)
    return calls


@pytest.mark.parametrize("family, most", [("wan21-t2v", 1.0), ("qwen-image", 1.11)])
def test_copies_are_freed_before_a_block_holds_most(contiguous, family, most):
    """Which is in its feed-forward layers, but for blocks that join two streams for attention."""
    peaks = {kernel: dry_run.run(family, "ulysses", 1, 0, kernel).peak for kernel in ("auto", "cudnn")}
    assert contiguous and all(contiguous)
    assert 1.0 <= peaks["cudnn"] / peaks["auto"] <= most
    (plan,) = plans_of(family, "ulysses", 1, calls=dry_run.STEPS)
    assert peaks["cudnn"] <= request_need(plan).likely
