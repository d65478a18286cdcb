"""Tokens of a request in the image stream."""

from types import SimpleNamespace

import pack  # noqa: F401  # makes parallel_dit importable
import pytest
from parallel_dit.nodes.host.request_estimate import request_estimate

from backend.planner.machine import RequestEstimate, sides_of

SHAPE = SimpleNamespace(patch=(1, 2, 2), static_text=False)


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
    references = [sides_of(shape[1:]) for shape in shapes]
    asked = request_estimate(SHAPE, (1, 128, 128), references, RequestEstimate(steps=4))
    assert asked.image_tokens == tokens and asked.reference_tokens == tokens - 4096 and asked.steps == 4
