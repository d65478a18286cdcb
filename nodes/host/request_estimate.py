"""A request as the planner counts it: tokens in the image stream and among the text."""

from collections.abc import Iterable
from dataclasses import replace

from ...backend.planner.machine import RequestEstimate, Sides, tokens_of
from ...backend.planner.model_shape import ModelShape


def request_estimate(
    shape: ModelShape, sides: Sides, references: Iterable[Sides], about: RequestEstimate
) -> RequestEstimate:
    """Return ``about``, whose ``text_tokens`` are those of a prompt alone, with the tokens of a latent and of
    its references. ``sides``, ``references``: (T, H, W) of each. References count among the text where the
    model keeps keys and values of text, else in the image stream; admission counts them too
    (rank_plan/request_size.py)."""
    image_tokens = tokens_of(sides, shape.patch)
    further = sum(tokens_of(each, shape.patch) for each in references)
    if shape.static_text:
        return replace(about, image_tokens=image_tokens, text_tokens=about.text_tokens + further)
    return replace(about, image_tokens=image_tokens + further, reference_tokens=further)
