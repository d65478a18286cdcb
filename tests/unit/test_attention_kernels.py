"""The local attention kernels, and the form in which CUDA's takes a mask."""

import pytest
import torch

from backend.parallel.attention_kernels import ALIGNMENT, aligned, attend_lse

#: Biases that torch.ops.aten._scaled_dot_product_efficient_attention refuses: rows of 13 keys, a ring rank's
#: slice of a longer mask (columns, then their beginning), another last dimension.
REFUSED = {
    "keys": torch.randn(2, 1, 3, 13),
    "slice": torch.randn(2, 1, 3, 20)[..., 4:12],
    "begins": torch.randn(2, 1, 3, 24)[..., 4:12],
    "transposed": torch.randn(2, 1, 8, 8).transpose(2, 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_of_a_bias_begin_at_multiples(name):
    bias = REFUSED[name]
    found = aligned(bias)
    assert found.equal(bias) and found is not bias
    assert (
        found.stride(-1) == 1
        and found.storage_offset() == 0
        and all(step % ALIGNMENT == 0 for step in found.stride()[:-1])
    )


@pytest.mark.parametrize(
    "bias",
    [
        torch.zeros(2, 1, 3, 16),
        torch.zeros(1, 1, 1, 16).expand(2, 4, 3, 16),
        torch.zeros(2, 1, 3, 24)[..., 8:13],
    ],
    ids=["whole", "broadcast", "slice"],
)
def test_a_bias_that_fits_is_not_copied(bias):
    assert aligned(bias) is bias


@pytest.mark.parametrize("shape", [(1, 1, 1, 13), (2, 1, 1, 13), (2, 1, 5, 13)])
@pytest.mark.parametrize("boolean", [True, False])
def test_log_sum_exp_of_masked_attention(shape, boolean):
    """Against softmax by hand; a row whose keys are all masked gives 0 and -inf."""
    torch.manual_seed(0)
    q, k, v, seen = (
        torch.randn(2, 4, 5, 16),
        torch.randn(2, 4, 13, 16),
        torch.randn(2, 4, 13, 16),
        torch.rand(shape) > 0.4,
    )
    if shape[2] > 1:
        seen[0, :, 2] = False
    bias = torch.zeros(shape).masked_fill(~seen, float("-inf"))
    out, lse = attend_lse("auto", q, k, v, seen if boolean else bias)
    scores = q @ k.transpose(2, 3) * 16**-0.5 + bias
    assert torch.allclose(lse, scores.logsumexp(dim=-1), atol=1e-5)
    assert torch.allclose(out, scores.softmax(dim=-1).nan_to_num() @ v, atol=1e-5)
