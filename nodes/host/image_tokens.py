"""How many tokens a request has in the image stream, as the planner counts it."""

from collections.abc import Iterable

from torch import Tensor

from ...backend.planner.machine import Sides, sides_of, tokens_of


def image_tokens(sides: Sides, references: Iterable[Tensor], patch: Sides) -> int:
    """Count the tokens of a latent (T, H, W) and of reference latents (B, C, [T,] H, W) after it, which
    admission counts too (rank_plan/request_size.py)."""
    return tokens_of(sides, patch) + sum(
        tokens_of(sides_of(latent.shape[1:]), patch) for latent in references
    )
