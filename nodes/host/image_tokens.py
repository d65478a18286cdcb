"""How many tokens a request has in the image stream, as the planner counts it."""

from collections.abc import Iterable

from torch import Tensor

from ...backend.planner.machine import tokens_of

Sides = tuple[int, int, int]


def image_tokens(sides: Sides, references: Iterable[Tensor], patch: Sides) -> int:
    """Count the tokens of a latent (T, H, W) and of reference latents (B, C, [T,] H, W) behind it, which
    admission counts too (rank_plan/request_size.py)."""
    return tokens_of(sides, patch) + sum(tokens_of(_sides(latent), patch) for latent in references)


def _sides(latent: Tensor) -> Sides:
    time, height, width = (1, *latent.shape[2:])[-3:]
    return time, height, width
