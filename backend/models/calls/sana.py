"""SANA: the arguments of its forward and what is changed in diffusers' modules."""

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from diffusers.models.transformers.sana_transformer import GLUMBConv, SanaTransformerBlock

from ... import mixing


class LinearAttention(SanaLinearAttnProcessor2_0):
    """relu(q) (sum over rows of relu(k) [v, 1]), whose last column divides the others."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k = q if attn.norm_q is None else attn.norm_q(q), k if attn.norm_k is None else attn.norm_k(k)
        q, k, v = (
            x.unflatten(2, (attn.heads, -1)).transpose(1, 2).float() for x in (F.relu(q), F.relu(k), v)
        )
        v = F.pad(v, (0, 1), value=1.0)
        out = q @ mixing.whole_sum(lambda rows: k[:, :, rows].transpose(2, 3) @ v[:, :, rows])
        out = (out[..., :-1] / (out[..., -1:] + 1e-15)).transpose(1, 2).flatten(2).to(hidden_states.dtype)
        out = attn.to_out[1](attn.to_out[0](out))
        return out.clip(-65504, 65504) if out.dtype == torch.float16 else out


class MixedMLP(GLUMBConv):
    """The MLP over some rows, (B, D, n, 1), on as many whole lines of the picture (``width`` tokens each) as
    they need."""

    def forward(self, hidden_states):
        n = hidden_states.shape[2]
        rows, first, before = mixing.all_around(hidden_states[..., 0].transpose(1, 2), self.width + 1)
        front = first % self.width
        lines = F.pad(rows, (0, 0, front, -(front + rows.shape[1]) % self.width)).unflatten(
            1, (-1, self.width)
        )
        out = super().forward(lines.permute(0, 3, 1, 2)).flatten(2)
        return out[:, :, front + before : front + before + n, None]


class Block(SanaTransformerBlock):
    """SANA's block for any number of rows."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        timestep=None,
        height=None,
        width=None,
    ):
        self.ff.width = width
        return super().forward(
            hidden_states,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            timestep,
            hidden_states.shape[1],
            1,
        )


def adjust(transformer, config):
    """The same modules and weights, with the methods above."""
    for block in transformer.transformer_blocks:
        block.__class__, block.ff.__class__ = Block, MixedMLP
        block.attn1.set_processor(LinearAttention())


def forward_args(config, grid, latent, sigma, cond):
    """Timesteps run to 1000."""
    return dict(
        hidden_states=grid.pad(latent),
        encoder_hidden_states=cond["c_crossattn"],
        encoder_attention_mask=cond.get("attention_mask"),
        timestep=sigma.expand(latent.shape[0]) * 1000 * config["timestep_scale"],
    )
