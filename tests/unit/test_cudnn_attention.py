"""cuDNN's attention: through torch's function, without copies; its trial; where it leaves calls to others."""

import pytest
import torch
import torch.nn.functional as F
from attention_stubs import by_cudnn

from backend.parallel import kernel_table as table
from backend.parallel import kernel_trial
from backend.parallel.attention_kernels import attend, instead_of_torch
from backend.parallel.kernel_table import SDPA, fits

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
    """By the hook of models that run whole. Nothing is copied, and torch's own choice stays as it was."""
    enabled = torch.backends.cuda.flash_sdp_enabled()
    tensors = projected()
    with instead_of_torch("cudnn"):
        out = F.scaled_dot_product_attention(*tensors)
    assert len(given) == 1 and all(one is other for one, other in zip(given[0], tensors))
    assert out.equal(SDPA(*tensors)) and torch.backends.cuda.flash_sdp_enabled() == enabled


@pytest.mark.parametrize("is_wrong", [False, True])
def test_cudnn_is_tried_with_the_strides_of_requests(given, monkeypatch, is_wrong):
    """Where it is wrong with them it is refused."""

    def as_if_contiguous(q, k, v, *, scale):
        strides = torch.empty(q.shape, device="meta").stride()
        return by_cudnn(q.as_strided(q.shape, strides), k, v, scale=scale)

    if is_wrong:
        monkeypatch.setattr(table, "SDPA", as_if_contiguous)
    why = kernel_trial.failure("cudnn", torch.bfloat16, 64, False, CPU)
    assert "of its values" in why if is_wrong else not why and not given[0][0].is_contiguous()


def test_cudnn_that_torch_does_not_have_is_refused():
    """As torch for the CPU, which says so itself."""
    assert "RuntimeError: No viable backend" in kernel_trial.failure("cudnn", torch.bfloat16, 64, False, CPU)
