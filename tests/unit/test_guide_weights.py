"""Weights of LTX's guides as features of queries and keys, against a mask of tokens by tokens."""

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

from backend.models.common import guide_weights

HEADS, TOKENS = 4, 11


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def mask(weights):
    """ComfyUI's GuideAttentionMask as one mask (B, 1, TOKENS, TOKENS)."""
    logs = weights.log().clamp(min=torch.finfo(torch.float32).min)
    before = TOKENS - logs.shape[1]
    whole = torch.zeros(len(logs), 1, TOKENS, TOKENS)
    whole[:, 0, :before, before:] = logs[:, None]
    whole[:, 0, before:, :before] = logs[:, :, None]
    return whole


@pytest.mark.parametrize("weights", [[[0.3, 0.7, 1.0]], [[0.0, 1e-9, 2.5], [10.0, 0.0, 1.0]], [[0.0] * 3]])
@pytest.mark.parametrize("size", [64, 20])
def test_attention_is_that_under_a_mask(weights, size):
    weights = torch.tensor(weights)
    batch = max(2, len(weights))
    q, k, v = (randn(batch, HEADS, TOKENS, size) + i for i in range(3))
    weighed = guide_weights.features(weights, TOKENS).transpose(1, 2)[:, None]
    want = F.scaled_dot_product_attention(q, k, v, mask(weights))
    assert not torch.allclose(want, F.scaled_dot_product_attention(q, k, v), atol=1e-3)
    found = guide_weights.attend_weighed(q, k, v, weighed.expand(batch, -1, -1, -1))
    assert torch.allclose(found, want, rtol=1e-5, atol=1e-6)


def rotary(kind):
    """Positions (cls, plain, what calls it) of LTX-Video, or LTX-2's two layouts."""
    if kind == "ltxv":
        plain = LTXVideoRotaryPosEmbed(32)
        return guide_weights.VideoPositions, plain, (randn(1, TOKENS, 32), 1, 1, 1, None), ()
    plain = LTX2AudioVideoRotaryPosEmbed(dim=32, num_attention_heads=HEADS, rope_type=kind)
    return guide_weights.AudioVideoPositions, plain, (), (2,)


@pytest.mark.parametrize("kind", ["ltxv", "split", "interleaved"])
def test_positions_hand_the_weights_on(kind):
    cls, module, arguments, sides = rotary(kind)
    places = randn(1, 3, TOKENS, *sides)
    weighed = guide_weights.features(torch.tensor([[0.5, 2.0]]), TOKENS)
    plain = module(*arguments, places)
    further = weighed if not sides else weighed[..., None].expand(-1, -1, -1, 2)
    module.__class__, module.heads = cls, HEADS
    assert len(module(*arguments, places)) == 2
    found, weights = guide_weights.divided(module(*arguments, torch.cat([places, further], dim=1)), HEADS)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert weights is not None and torch.equal(
        weights, weighed.transpose(1, 2)[:, None].expand(-1, HEADS, -1, -1)
    )
