"""A request as the planner counts it: tokens in the image stream and among the text."""

from collections.abc import Iterable

from ...backend.planner.machine import RequestEstimate, Sides, tokens_of
from ...backend.planner.model_shape import ModelShape


def request_estimate(
    shape: ModelShape, sides: Sides, references: Iterable[Sides], text_tokens: int, **request
) -> RequestEstimate:
    """Return the estimate of a request for latents (T, H, W) with reference latents after them, which
    admission counts too (rank_plan/request_size.py): among the text where keys and values of text stay, whose
    references are. ``request``: further fields."""
    image_tokens = tokens_of(sides, shape.patch)
    further = sum(tokens_of(each, shape.patch) for each in references)
    if shape.static_text:
        return RequestEstimate(image_tokens, text_tokens + further, **request)
    return RequestEstimate(image_tokens + further, text_tokens, reference_tokens=further, **request)
