"""A round of trials of an attention kernel counts once all ranks know what it does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from backend.parallel.attention import kernel_trial
from backend.parallel.attention.kernel_table import KERNELS
from backend.rank import kernel_round

CPU = torch.device("cpu")
NO_MEMORY = kernel_trial.NO_MEMORY


class Round:
    """A rank whose trials find ``found``, one after the other, while another one finds ``other``."""

    def __init__(self, monkeypatch, found: list, other: str = "", head_size: int = 64):
        monkeypatch.setattr(kernel_trial, "failure", self.failure)
        monkeypatch.setitem(KERNELS, "sage", replace(KERNELS["sage"], call=print))
        self.model = SimpleNamespace(dtype=torch.bfloat16, head_size=head_size)
        self.found = found
        self.other = other
        self.tried = {}
        self.sent = []

    def failure(self, *_) -> str:
        found = self.found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def gather(self, own: str) -> list[str]:
        self.sent.append(own)
        return [own, self.other]

    def refusal(self) -> str:
        return kernel_round.refusal("sage", self.model, False, CPU, self.tried, self.gather)


@pytest.mark.parametrize("own, other", [(NO_MEMORY, ""), ("", NO_MEMORY), (NO_MEMORY, NO_MEMORY)])
def test_a_trial_without_memory_is_made_again_by_all_ranks(monkeypatch, own, other):
    ranks = Round(monkeypatch, [own, "it is wrong"], other)
    assert not ranks.refusal() and not ranks.tried
    assert "rank 0: it is wrong" in ranks.refusal() and len(ranks.sent) == 2
    assert "rank 0: it is wrong" in ranks.refusal() and len(ranks.sent) == 2  # which all of them know now


def test_what_fails_on_one_rank_is_refused_though_another_has_no_memory(monkeypatch):
    ranks = Round(monkeypatch, [NO_MEMORY], "it is wrong")
    for _ in range(2):
        assert "(rank 1: it is wrong)" in ranks.refusal()
    assert ranks.sent == [NO_MEMORY]


@pytest.mark.parametrize(
    "found, sent",
    [([NO_MEMORY, ""], ""), (["it is wrong", NO_MEMORY], NO_MEMORY), (["wrong", "raises"], "wrong")],
)
def test_heads_of_unknown_size_are_known_to_fail_with_all_sizes_alone(monkeypatch, found, sent):
    ranks = Round(monkeypatch, found, head_size=0)
    ranks.refusal()
    assert ranks.sent == [sent]


def test_a_trial_that_raises_is_not_noted(monkeypatch):
    ranks = Round(monkeypatch, [RuntimeError("the GPU is lost"), ""])
    with pytest.raises(RuntimeError):
        ranks.refusal()
    assert not ranks.tried


def test_torchs_own_kernels_are_tried_again_where_memory_ran_out(monkeypatch):
    known = [False, True]
    monkeypatch.setattr(kernel_trial, "settle", lambda *_: known.pop(0))
    model = SimpleNamespace(dtype=torch.bfloat16, head_size=64)
    tried = {}
    for left in ([True], [], []):
        assert kernel_round.refusal("auto", model, True, torch.device("cuda"), tried, print) == ""
        assert known == left
