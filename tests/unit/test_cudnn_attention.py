"""cuDNN's attention: torch's function, its operator with the log-sum-exp, and contiguous copies for both."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from attention_stubs import by_cudnn

from backend.parallel.attention import kernel_table as table
from backend.parallel.attention import kernel_trial
from backend.parallel.attention.attention_kernels import attend, instead_of_torch
from backend.parallel.attention.kernel_choice import explained, why_unavailable
from backend.parallel.attention.kernel_table import SDPA, fits

CPU = torch.device("cpu")


@pytest.fixture
def given(monkeypatch):
    """Put a stand-in in the place of torch's function; collect what it is given."""
    tensors = []

    def recorded(q, k, v, *, scale):
        tensors.append((q, k, v))
        return by_cudnn(q, k, v, scale=scale)

    monkeypatch.setattr(table, "SDPA", recorded)
    return tensors


def projected():
    """Queries, keys and values as requests lay them out: next to each other, tokens slower than heads."""
    torch.manual_seed(0)
    return torch.randn(2, 5, 4, 192).bfloat16().transpose(1, 2).chunk(3, dim=-1)


@pytest.mark.parametrize("keys", [0, 1, 2])
def test_cudnn_attends_to_two_keys_or_more(given, keys):
    """torch refuses it fewer, which would end the ranks."""
    q, k, v = (each[:, :, :count] for each, count in zip(projected(), (5, keys, keys)))
    assert fits("cudnn", q, k, masked=False, lse=False) == (keys > 1)
    assert attend("cudnn", q, k, v).equal(SDPA(q, k, v)) and len(given) == (keys > 1)


def test_cudnn_attends_where_torchs_function_is_replaced(given):
    """By the hook of models that run whole. torch's own choice stays as it was."""
    enabled = torch.backends.cuda.flash_sdp_enabled()
    tensors = projected()
    with instead_of_torch("cudnn"):
        out = F.scaled_dot_product_attention(*tensors)
    assert len(given) == 1 and all(each.is_contiguous() for each in given[0])
    assert out.equal(SDPA(*tensors)) and torch.backends.cuda.flash_sdp_enabled() == enabled


def test_cudnn_is_given_contiguous_tensors(given):
    """With other strides diffusers saw it be wrong, and the trial has those of requests."""
    assert not kernel_trial.failure("cudnn", torch.bfloat16, 64, False, CPU)
    assert given and all(each.is_contiguous() for tensors in given for each in tensors)


def test_cudnn_that_torch_does_not_have_is_refused():
    """As torch for the CPU, which says so itself."""
    assert "RuntimeError: No viable backend" in kernel_trial.failure("cudnn", torch.bfloat16, 64, False, CPU)


def operator(trailing=(), off=1.0):
    """Stand for cuDNN's operator, whose log-sum-exp has a last dimension of 1 since torch 2.9."""

    def call(q, k, v, bias, compute_log_sumexp, dropout, is_causal, return_debug_mask, *, scale):
        assert bias is None and compute_log_sumexp and not (dropout or is_causal or return_debug_mask)
        assert all(each.is_contiguous() for each in (q, k, v)), "with other strides it was seen to be wrong"
        sums = (q.float() @ k.float().transpose(2, 3) * scale).logsumexp(-1)
        return SDPA(q, k, v, scale=scale), (sums * off).reshape(*sums.shape, *trailing), *[None] * 7

    return SimpleNamespace(_scaled_dot_product_cudnn_attention=call)


@pytest.mark.parametrize("trailing", [(), (1,)])
@pytest.mark.parametrize("off", [1.0, 1.4427])
def test_rings_get_cudnns_log_sum_exp(given, monkeypatch, trailing, off):
    """Compared in its trial: one in base 2 is refused."""
    monkeypatch.setattr(table, "aten", operator(trailing, off))
    q, k, v = projected()
    _, sums = table.KERNELS["cudnn"].call(q, k, v, 0.3, True)
    assert sums.shape == q.shape[:3]
    why = kernel_trial.failure("cudnn", torch.bfloat16, 64, True, CPU)
    assert why.startswith("its log-sum-exp is off by 2.") if off > 1 else not why


def test_cudnn_may_be_chosen_for_rings():
    facts = ("cudnn", "cuda", torch.bfloat16, 128, [(9, 0)], True)
    assert why_unavailable(*facts) is None
    assert "exact, whose log-sum-exp the ring merges by" in explained(*facts)
