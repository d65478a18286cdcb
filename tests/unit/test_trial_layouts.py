"""Attention kernels are tried with the layouts and lengths that requests have: what is right for one
contiguous head, or for as many keys as queries alone, is refused."""

import math
from dataclasses import replace

import pytest
import torch
from attention_stubs import right

from backend.parallel.attention import kernel_trial
from backend.parallel.attention.kernel_table import KERNELS

CPU = torch.device("cpu")


def failure(monkeypatch, call, lse=True):
    """Try a call in the place of SageAttention's."""
    monkeypatch.setitem(KERNELS, "sage", replace(KERNELS["sage"], call=call))
    return kernel_trial.failure("sage", torch.bfloat16, 64, lse, CPU)


def by_address(x):
    """What lies where a contiguous tensor would have the numbers of ``x``."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def contiguous_queries(q, k, v, scale, lse):
    return right(by_address(q), k, v, scale, lse)


def strides_of_queries(q, k, v, scale, lse):
    """Reads values by the strides of queries, as far as memory goes."""
    places = torch.arange(q.untyped_storage().size() // q.itemsize).as_strided(q.shape, q.stride())
    whole = v.flatten()
    return right(q, k, whole[places % len(whole)], scale, lse)


def first_head(q, k, v, scale, lse):
    return right(q, *(each[:, :1].expand_as(each) for each in (k, v)), scale, lse)


def last_head_lost(q, k, v, scale, lse):
    out, sums = right(q, k, v, scale, lse)
    out[-1, -1] = 0
    return out, sums


def in_base_2(q, k, v, scale, lse):
    out, sums = right(q, k, v, scale, lse)
    return out, sums / math.log(2) if lse else None


@pytest.mark.parametrize(
    "call, says",
    [
        (contiguous_queries, "of its values"),
        (strides_of_queries, "of its values"),
        (first_head, "of its values"),
        (last_head_lost, "it is off by 1 of its values"),
        (in_base_2, "its log-sum-exp is off by 2."),
    ],
)
def test_what_is_right_for_one_contiguous_head_alone_is_refused(monkeypatch, call, says):
    assert says in failure(monkeypatch, call)


def tokens_for_heads(q, k, v, scale, lse):
    """As SageAttention 2.2.0 with heads first: it repeats the mean of the keys for the log-sum-exp."""
    groups = q.shape[2] // k.shape[2]
    if lse:
        q @ k.mean(dim=2, keepdim=True).repeat_interleave(groups, 1).transpose(2, 3)
    return right(q, k, v, scale, lse)


def keys_of_queries(q, k, v, scale, lse):
    """Of whose rows the last are lost where there are fewer keys."""
    out, sums = right(q, k, v, scale, lse)
    out[:, :, k.shape[2] :] = 0
    return out, sums


@pytest.mark.parametrize(
    "call, lse, says",
    [
        (tokens_for_heads, True, "RuntimeError: The size of tensor a"),
        (tokens_for_heads, False, ""),
        (keys_of_queries, False, "of its values for 1096 keys"),
    ],
)
def test_a_kernel_for_as_many_keys_as_queries_alone_is_refused(monkeypatch, call, lse, says):
    found = failure(monkeypatch, call, lse)
    assert says in found and bool(says) == bool(found)


def test_a_right_kernel_passes_with_its_log_sum_exp(monkeypatch):
    assert failure(monkeypatch, right) == ""
