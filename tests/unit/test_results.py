"""Results without any number are refused, those with some are not."""

import pytest
import torch

from backend.errors import UnsupportedError
from backend.models.latent_tokens import PartialGrid
from backend.sampling.tensor_validation import check_result

NAN = float("nan")
VIDEO = PartialGrid((2, 2, 4, 6), (1, 2, 2), torch.tensor([0, 3, 4, 11]))


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_gaps_of_a_latent_are_no_numbers(value):
    """A latent of some tokens is 0 at the others, whatever the model has computed."""
    tokens = torch.full((1, VIDEO.tokens, VIDEO.features), value)
    latent = VIDEO.to_latent(tokens)
    assert torch.isfinite(latent).any()
    with pytest.raises(UnsupportedError, match="in every value"):
        check_result(latent, "a.safetensors", torch.float16, "auto")
    tokens[0, 2, 1] = 0.5
    check_result(VIDEO.to_latent(tokens), "a.safetensors", torch.float16, "auto")


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [1.0, 2.0], [NAN, 2.0]], ids=str)
def test_results_with_numbers_pass(values):
    check_result(torch.tensor(values), "a.safetensors", torch.float32, "auto")


THEN = "and if that does not help, download the file again"


@pytest.mark.parametrize(
    "dtype, attention, remedy",
    [
        (torch.bfloat16, "auto", "download it again"),
        (torch.bfloat16, "flash-attn", "download it again"),
        (torch.bfloat16, "sage", f"set attention to auto, {THEN}"),
        (torch.float16, "sage", f"set attention to auto, or weight_dtype to bf16 or fp32, {THEN}"),
    ],
)
def test_an_approximate_kernel_is_suspected_before_the_file(dtype, attention, remedy):
    with pytest.raises(UnsupportedError) as refused:
        check_result(torch.full((2,), NAN), "a.safetensors", dtype, attention)
    assert str(refused.value).endswith(f"; {remedy}.")
