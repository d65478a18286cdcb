"""Tokens of a request in the image stream."""

import pack  # noqa: F401  # makes parallel_dit importable
import pytest
import torch
from parallel_dit.nodes.host.image_tokens import image_tokens

PATCH = (1, 2, 2)


@pytest.mark.parametrize(
    "shapes, tokens",
    [
        ([], 4096),
        ([(1, 16, 128, 128)], 8192),
        ([(1, 16, 1, 128, 128), (1, 16, 64, 64)], 4096 + 4096 + 1024),
        ([(1, 16, 3, 128, 127)], 4096 + 3 * 4096),
    ],
    ids=["none", "one of 1024 x 1024", "two", "frames"],
)
def test_references_are_counted_behind_the_latent(shapes, tokens):
    """As admission counts them: an edit of one image has twice the tokens."""
    references = [torch.empty(shape, device="meta") for shape in shapes]
    assert image_tokens((1, 128, 128), references, PATCH) == tokens
