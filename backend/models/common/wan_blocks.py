"""Wan's blocks in fewer passes over activations (fewer_passes.py): 38 bytes a value for norms, modulation and
residuals where diffusers moves 166."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanTransformerBlock
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformerBlock
from torch import Tensor

from .fewer_passes import angles_of, gated, modulated, normed, turned


class WanBlock(WanTransformerBlock):
    """A block of Wan; modulation, temb (B, 6, D) or (B, tokens, 6, D), stays in float32."""

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb):
        if torch.compiler.is_compiling():
            return super().forward(hidden_states, encoder_hidden_states, temb, rotary_emb)
        return _run(self, hidden_states, encoder_hidden_states, temb, rotary_emb)


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


def _run(block: WanTransformerBlock | WanVACETransformerBlock, x: Tensor, text, temb, rotary_emb) -> Tensor:
    of_all = temb[:, None] if temb.ndim == 3 else temb
    modulation = block.scale_shift_table + of_all.float()
    modulation[:, :, 1::3] += 1  # scales
    shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation.to(x.dtype).unbind(2)
    attended = block.attn1(modulated(block.norm1, x, scale, shift), None, None, rotary_emb)
    x = gated(x, attended, gate)
    x = x + block.attn2(normed(block.norm2, x), text, None, None)
    return gated(x, block.ffn(modulated(block.norm3, x, ff_scale, ff_shift)), ff_gate)


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
