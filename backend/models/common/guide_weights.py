"""How much a video and its guides attend to each other in LTX-Video and LTX-2 (a strength other than 1, an
attention mask), without a mask of tokens by tokens.

ComfyUI adds log(w) between a guide's token of weight w and every token of the video (GuideAttentionMask in
ldm/lightricks/model.py). That is a product of two features more: q·k + is_video(q) log w(k) + log w(q)
is_video(k). So it is divided, sent and cached with queries and keys, and every kernel computes it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from torch import Tensor

#: Axes of a video's positions: time, height, width.
AXES = 3
#: Features that are added to those of a head: kernels take multiples of so many.
FEATURES = 8
#: The logarithm of weight 0. Its product with a head's scale is a number of float16 too.
NOTHING = -1000.0


def features(weights: Tensor, tokens: int) -> Tensor:
    """Return (B, 2, tokens): is it a token of the video, and its log weight; ``weights`` (B, guides) are of
    the last tokens."""
    logs = weights.float().log().clamp(min=NOTHING)
    before = tokens - logs.shape[1]
    return torch.stack([F.pad(torch.zeros_like(logs), (before, 0), value=1.0), F.pad(logs, (before, 0))], 1)


def attend_weighed(q: Tensor, k: Tensor, v: Tensor, weighed: Tensor) -> Tensor:
    """Compute attention (B, H, S, D) with the ``features`` of each token, (B, H or 1, S, 2)."""
    size = q.shape[-1]
    scale = size**-0.5
    room = (0, FEATURES - weighed.shape[-1])
    swapped = F.pad(weighed.flip(-1), room).expand(*q.shape[:3], -1) / scale
    weighed = F.pad(weighed, room).expand(*q.shape[:3], -1)
    q = torch.cat([q, weighed.to(q.dtype)], dim=-1)
    k = torch.cat([k, swapped.to(k.dtype)], dim=-1)
    return F.scaled_dot_product_attention(q, k, F.pad(v, (0, FEATURES)), scale=scale)[..., :size]


class WeighedPositions:
    """Rotary positions that hand ``features``, the axes after time, height and width, on as a third tensor,
    for every head and in the layout of the other two."""

    heads: int

    def forward(self, *args, **kwargs):
        *before, places = args
        # the class of diffusers that a family mixes this one into has it
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        rotary: Any = forward(*before, places[:, :AXES], **kwargs)
        if places.shape[1] == AXES:
            return rotary
        weights = places[:, AXES:] if places.ndim == 3 else places[:, AXES:, :, 0]
        weights = weights.transpose(1, 2)
        if rotary[0].ndim == 3:
            return (*rotary, weights.repeat(1, 1, self.heads))
        return (*rotary, weights[:, None].expand(-1, self.heads, -1, -1))


class VideoPositions(WeighedPositions, LTXVideoRotaryPosEmbed):
    """LTX-Video's."""


class AudioVideoPositions(WeighedPositions, LTX2AudioVideoRotaryPosEmbed):
    """LTX-2's."""


def divided(rotary: tuple, heads: int) -> tuple[tuple, Tensor | None]:
    """Return (cosine and sine, ``features`` (B, heads, S, 2) or None) of what WeighedPositions hand on."""
    if len(rotary) == 2:
        return rotary, None
    found = rotary[2]
    return rotary[:2], found if found.ndim == 4 else found.unflatten(2, (heads, -1)).transpose(1, 2)
