"""Tokens of which a model's forward needs the shape alone: what embedders of the latent return on stages
after the first (Cache.image_modules), zeros of which one is in memory."""

import torch
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
