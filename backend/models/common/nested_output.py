"""The end of models that denoise several latents at once, which have a last layer for each."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .shape_only import has_values, shape_only


def join_latents(latents: Sequence[Tensor], order: tuple[int, ...]) -> Tensor:
    """Join the tokens (B, n, F) of each latent into one tensor as NestedGrid.join does: in ``order``, the
    narrower of them ending in zeros. A shape alone where one of them is that."""
    widest = max(latents, key=_width)
    if not all(map(has_values, latents)):
        return shape_only(widest, sum(latent.shape[1] for latent in latents))
    return torch.cat([F.pad(latents[i], (0, _width(widest) - _width(latents[i]))) for i in order], dim=1)


def _width(tokens: Tensor) -> int:
    return tokens.shape[2]


class NestedOutput(nn.Module):
    """What Blocks.output_layer names of such a model: after it the outputs of a rank's own tokens are filled
    up to those of all latents, in one tensor. It has no weights."""

    def __init__(self, order: tuple[int, ...]):
        super().__init__()
        self.order = order

    def forward(self, latents):
        return join_latents(latents, self.order)
