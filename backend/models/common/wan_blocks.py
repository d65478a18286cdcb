"""Wan's blocks in fewer passes over activations (fewer_passes.py): 38 bytes a value for norms, modulation and
residuals where diffusers moves 166. Frames may have noise levels of their own (token_levels.py)."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import (
    WanAttnProcessor,
    WanTimeTextImageEmbedding,
    WanTransformerBlock,
)
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformerBlock
from torch import Tensor

from .fewer_passes import angles_of, gated, modulated, normed, turned
from .token_levels import part_of_tokens


class WanEmbedder(WanTimeTextImageEmbedding):
    """Embed a timestep of each sample, or of each frame: (B,), or flattened with ``timestep_seq_len`` frames.

    Of frames, blocks are given the number of each token's level, (B, tokens, 6), in the place of modulation;
    ``levels`` has that (share_levels).
    """

    levels: Any

    def forward(
        self, timestep, encoder_hidden_states, encoder_hidden_states_image=None, timestep_seq_len=None
    ):
        embedding, modulation, *prompts = super().forward(
            timestep, encoder_hidden_states, encoder_hidden_states_image, timestep_seq_len
        )
        if timestep_seq_len is None:
            return embedding, modulation, *prompts
        levels = self.levels
        levels.embedding = embedding.flatten(0, 1)
        levels.modulation = modulation.flatten(0, 1).unflatten(1, (6, -1))
        return embedding[:, 0], levels.level_of_token[..., None].expand(-1, -1, 6), *prompts


class WanBlock(WanTransformerBlock):
    """A block of Wan. Modulation stays in float32: temb (B, 6, D), or that of ``levels`` (share_levels),
    whose numbers temb (B, tokens, 6, 1) has. Compiled, it makes all parts of all its tokens at once,
    for diffusers' form."""

    levels: Any

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb):
        level_of_token = None
        if temb.ndim == 4:
            level_of_token = temb[:, :, 0, 0]
            temb = self.levels.modulation
        if torch.compiler.is_compiling():
            of_all = temb if level_of_token is None else temb[level_of_token]
            return super().forward(hidden_states, encoder_hidden_states, of_all, rotary_emb)
        return _run(self, hidden_states, encoder_hidden_states, temb, rotary_emb, level_of_token)


class ControlBlock(WanVACETransformerBlock):
    """A control block of VACE."""

    def forward(self, hidden_states, encoder_hidden_states, control_hidden_states, temb, rotary_emb):
        given = encoder_hidden_states, temb, rotary_emb
        if torch.compiler.is_compiling():
            return super().forward(hidden_states, encoder_hidden_states, control_hidden_states, *given[1:])
        state = control_hidden_states
        if self.proj_in is not None:
            state = self.proj_in(state) + hidden_states
        state = _run(self, state, *given)
        return None if self.proj_out is None else self.proj_out(state), state


def _run(
    block: WanTransformerBlock | WanVACETransformerBlock,
    x: Tensor,
    text: Tensor,
    temb: Tensor,
    rotary_emb: Any,
    level_of_token: Tensor | None = None,
) -> Tensor:
    modulation = block.scale_shift_table + temb.float()
    modulation[:, 1::3] += 1  # scales
    modulation = modulation.to(x.dtype)
    part = part_of_tokens(modulation, level_of_token)
    attended = block.attn1(modulated(block.norm1, x, part(1), part(0)), None, None, rotary_emb)
    x = gated(x, attended, part(2))
    x = x + block.attn2(normed(block.norm2, x), text, None, None)
    return gated(x, block.ffn(modulated(block.norm3, x, part(4), part(3))), part(5))


class SelfAttention(WanAttnProcessor):
    """Self-attention with rotary embeddings ((1, tokens, 1, D), of which two neighbours are equal)."""

    def __call__(
        self,
        attn: Any,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        rotary_emb: Any = None,
    ):
        if torch.compiler.is_compiling():
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        angles = angles_of(rotary_emb)
        layers = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = (layer(hidden_states) for layer in layers)
        query = attn.norm_q(query)
        key = attn.norm_k(key)
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        query = turned(query, angles)
        key = turned(key, angles)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))
