"""How many tokens a request has in the image stream and among the text, as the planner counts them."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from ...backend.planner.machine import Sides, sides_of, tokens_of
from ...backend.planner.model_shape import ModelShape


def image_tokens(sides: Sides, references: Iterable[Tensor], patch: Sides) -> int:
    """Count the tokens of a latent (T, H, W) and of reference latents (B, C, [T,] H, W) after it, which
    admission counts too (rank_plan/request_size.py)."""
    return tokens_of(sides, patch) + sum(
        tokens_of(sides_of(latent.shape[1:]), patch) for latent in references
    )


def tokens_of_streams(sides: Sides, references: Sequence[Tensor], shape: ModelShape) -> tuple[int, int]:
    """Count the tokens of a latent and its references in the image stream, and those among the text: what
    keeps the keys and values of text has references in it."""
    tokens = image_tokens(sides, references, shape.patch)
    among_text = tokens - image_tokens(sides, (), shape.patch) if shape.static_text else 0
    return tokens - among_text, among_text
