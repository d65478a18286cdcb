"""LTX-Video's blocks, whose tokens may have noise levels of their own (token_levels.py)."""

from typing import Any

import torch
from diffusers.models.normalization import AdaLayerNormSingle
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock

from .token_levels import added_part

#: Parts of a block's modulation that are scales.
SCALES = (1, 4)


class VideoEmbedder(AdaLayerNormSingle):
    """Embed a timestep of each sample (B,), or, where the call has level_of_token, of each level (levels,).

    Of levels, blocks are given the number of each token's, (B x tokens, 1), in the place of modulation;
    ``levels`` has that (share_levels).
    """

    levels: Any

    def forward(self, timestep, added_cond_kwargs=None, batch_size=None, hidden_dtype=None):
        levels = self.levels
        if levels.level_of_token is None:
            return super().forward(timestep, added_cond_kwargs, batch_size, hidden_dtype)
        found: Any = super().forward(timestep, added_cond_kwargs, batch_size, hidden_dtype)
        modulation, levels.embedding = found
        levels.modulation = modulation.unflatten(1, (6, -1))
        return levels.level_of_token.view(-1, 1), levels.embedding[:1].expand(batch_size, -1)


class VideoBlock(LTXVideoTransformerBlock):
    """A block of LTX-Video. temb: modulation (B, 1, 6 x D), or the numbers of tokens' levels (B, tokens, 1),
    whose modulation ``levels`` has (share_levels). Compiled, it makes all parts of all its tokens at once,
    for diffusers' form."""

    levels: Any

    def forward(
        self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, encoder_attention_mask=None
    ):
        if temb.is_floating_point():
            return super().forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, encoder_attention_mask
            )
        level_of_token = temb[..., 0]
        modulation = self.levels.modulation
        if torch.compiler.is_compiling():
            of_all = modulation.flatten(1)[level_of_token]
            return super().forward(
                hidden_states, encoder_hidden_states, of_all, image_rotary_emb, encoder_attention_mask
            )

        part = added_part(self.scale_shift_table, modulation, level_of_token, SCALES)
        x = self.norm1(hidden_states) * part(1) + part(0)
        hidden_states = hidden_states + self.attn1(x, image_rotary_emb=image_rotary_emb) * part(2)
        hidden_states = hidden_states + self.attn2(
            hidden_states, encoder_hidden_states, attention_mask=encoder_attention_mask
        )
        x = self.norm2(hidden_states) * part(4) + part(3)
        return hidden_states + self.ff(x) * part(5)
