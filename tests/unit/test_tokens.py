"""Latents become tokens and tokens latents, wherever and however they lie in memory."""

import pytest
import torch

from backend.models.latent_tokens import NestedGrid, PartialGrid, TokenGrid

SHAPES = {
    "square": ((3, 8, 6), (1, 2, 2)),
    "odd sides": ((3, 7, 5), (1, 2, 2)),
    "video": ((2, 4, 6, 4), (2, 2, 2)),
    "one pixel": ((4, 5, 3), (1, 1, 1)),
    "wide patch": ((2, 4, 12), (1, 2, 4)),
    "three": ((2, 6, 9), (1, 2, 3)),
}


def by_definition(grid: TokenGrid, latent: torch.Tensor) -> torch.Tensor:
    (t, h, w), (pt, ph, pw) = grid.counts, grid.patch
    x = grid.pad(latent).reshape(latent.shape[0], -1, t, pt, h, ph, w, pw)
    return x.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(latent.shape[0], grid.tokens, grid.features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape, patch", SHAPES.values(), ids=SHAPES)
def test_tokens_there_and_back(shape, patch, dtype):
    grid = TokenGrid(shape, patch)
    plain = torch.randn(2, *shape).to(dtype)
    shifted = (
        torch.empty(plain.numel() + 1, dtype=dtype)[1:].view(plain.shape).copy_(plain)
    )  # as in a message's body, behind an odd number of elements
    turned = plain.transpose(-1, -2).contiguous().transpose(-1, -2)
    wanted = by_definition(grid, plain)
    for latent in (plain, shifted, turned, torch.cat([plain, plain], dim=1)[:, : shape[0]]):
        tokens = grid.to_tokens(latent)
        assert tokens.dtype == dtype and tokens.equal(wanted)
    shifted = torch.empty(wanted.numel() + 1, dtype=dtype)[1:].view(wanted.shape).copy_(wanted)
    for tokens in (
        wanted,
        shifted,
        wanted.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([wanted, wanted], dim=2)[..., : grid.features],
    ):
        latent = grid.to_latent(tokens)
        assert latent.dtype == dtype and latent.equal(plain)


def test_tokens_of_a_partial_grid():
    """They alone are counted and moved; a latent made of them has zeros at the others."""
    places = torch.tensor([0, 3, 4, 11])
    video = PartialGrid((2, 2, 4, 6), (1, 2, 2), places)
    whole = TokenGrid(video.shape, video.patch)
    latent = torch.randn(2, *video.shape)
    tokens = video.to_tokens(latent)
    assert (video.cells, video.tokens) == (12, 4) and tokens.equal(whole.to_tokens(latent)[:, places])
    there = whole.to_latent(torch.zeros(2, 12, 8).index_fill_(1, places, 1.0))
    assert video.to_latent(tokens).equal(latent * there)
    assert video.padded.tokens == 4 and video.select(torch.arange(12), 0).equal(places)
    nested = NestedGrid((video, TokenGrid((2, 3, 4), (1, 1, 4))), (1, 0))
    packed = torch.randn(2, *nested.shape)
    assert nested.tokens == 7 and nested.to_tokens(nested.to_latent(nested.to_tokens(packed))).equal(
        nested.to_tokens(packed)
    )
