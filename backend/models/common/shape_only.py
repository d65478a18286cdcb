"""Tokens of which a model's forward needs the shape alone: what embedders of the latent return on stages
after the first (Cache.image_modules), zeros of which one is in memory."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def has_values(tokens: Tensor) -> bool:
    """Return whether ``tokens`` (B, n, D), of an embedder or of a last layer, are more than a shape: a tensor
    that was computed has a stride."""
    return any(tokens.stride())


def shape_only(like: Tensor, tokens: int) -> Tensor:
    """Return zeros (B, tokens, D) of which one is in memory, with samples, width and type of ``like``."""
    return like.new_zeros(1).expand(len(like), tokens, like.shape[2])


def join(pieces: list[Tensor]) -> Tensor:
    """Put tokens (B, n, D) of one type one after the other. Where one piece is a shape alone the result is:
    the stage is sent all of them."""
    if all(map(has_values, pieces)):
        return torch.cat(pieces, dim=1)
    return shape_only(pieces[0], sum(piece.shape[1] for piece in pieces))


def join_latents(latents: Sequence[Tensor], order: tuple[int, ...]) -> Tensor:
    """Join the tokens (B, n, F) of each latent into one tensor as NestedGrid.join does: in ``order``, the
    narrower of them ending in zeros. A shape alone where one of them is that."""
    widest = max(latents, key=lambda latent: latent.shape[2])
    if not all(map(has_values, latents)):
        return shape_only(widest, sum(latent.shape[1] for latent in latents))
    return torch.cat([_widened(latents[i], widest.shape[2]) for i in order], dim=1)


def _widened(tokens: Tensor, width: int) -> Tensor:
    """Add zeros up to ``width``; of none F.pad would make a copy."""
    missing = width - tokens.shape[2]
    return F.pad(tokens, (0, missing)) if missing else tokens
