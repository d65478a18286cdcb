"""SANA 1.0 and 1.5 of NVIDIA, text to image: 20 to 60 blocks of linear attention, cross-attention to the
prompt and an MLP with a 3 x 3 convolution; one latent pixel (of 32 x 32) a token.

Linear attention is a sum over tokens, so what ranks send does not grow with the image. ComfyUI does not
have this model: its files are diffusers folders, or the transformer's file out of one.
"""

from functools import wraps
from inspect import signature
from typing import Any

import torch.nn.functional as F
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from diffusers.models.transformers.sana_transformer import GLUMBConv, SanaTransformerBlock

from ..runtime.opaque_ops import opaque
from .blocks import APART, Blocks
from .common import token_mixing
from .common.joint_blocks import within_range
from .config_values import constant, entries
from .family import BF16_OR_FP16, Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import Layout, blocks_of


class LinearAttention(SanaLinearAttnProcessor2_0):
    """relu(q) (sum over tokens of relu(k) [v, 1]), whose last column divides the others."""

    def __call__(self, attn: Any, hidden_states, encoder_hidden_states=None, attention_mask=None):
        q = attn.to_q(hidden_states)
        k = attn.to_k(hidden_states)
        v = attn.to_v(hidden_states)
        q = F.relu(q if attn.norm_q is None else attn.norm_q(q))
        k = F.relu(k if attn.norm_k is None else attn.norm_k(k))
        q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2).float() for x in (q, k, v))
        v = F.pad(v, (0, 1), value=1.0)
        out = q @ token_mixing.linear_state(k, v)
        out = (out[..., :-1] / (out[..., -1:] + 1e-15)).transpose(1, 2).flatten(2).to(hidden_states.dtype)
        return within_range(attn.to_out[1](attn.to_out[0](out)))


class MixedMLP(GLUMBConv):
    """The MLP over some tokens, (B, D, n, 1), on the lines of the image (of ``width``) that they need."""

    width: int

    @opaque
    def forward(self, hidden_states):
        n = hidden_states.shape[2]
        tokens, first, before = token_mixing.with_halo(hidden_states[..., 0].transpose(1, 2), self.width + 1)
        front = first % self.width
        filled = F.pad(tokens, (0, 0, front, -(front + tokens.shape[1]) % self.width))
        lines = filled.unflatten(1, (-1, self.width))
        out = GLUMBConv.forward(self, lines.permute(0, 3, 1, 2)).flatten(2)
        return out[:, :, front + before : front + before + n, None]


#: What a block takes, in order.
ARGUMENTS = tuple(signature(SanaTransformerBlock.forward).parameters)[1:]


class SanaBlock(SanaTransformerBlock):
    """SANA's block for any number of tokens."""

    @wraps(SanaTransformerBlock.forward)
    def forward(self, *args, **call):
        call |= zip(ARGUMENTS, args)
        return super().forward(**call | {"height": call["hidden_states"].shape[1], "width": 1})


def patch_module(transformer, config):
    """Give the modules the methods above; weights stay the same."""
    for block in transformer.transformer_blocks:
        block.__class__ = SanaBlock
        block.ff.__class__ = MixedMLP
        block.attn1.set_processor(LinearAttention())


def prepare(transformer, grid):
    """Give the convolutions the width of the image (tokens). A block that is compiled would set it only after
    they have run: they are operators of its graph."""
    for module in transformer.modules():
        if isinstance(module, MixedMLP):
            module.width = grid.counts[2]


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward. Timesteps run to 1000."""
    return dict(
        hidden_states=grid.pad(latent),
        encoder_hidden_states=cond["c_crossattn"],
        encoder_attention_mask=cond.get("attention_mask"),
        timestep=sigma.expand(latent.shape[0]) * 1000 * config["timestep_scale"],
    )


#: Size of a head of linear attention, and of cross-attention by the model's width, which no shape tells.
HEAD = 32
CROSS_HEAD = 112
CROSS_HEADS = {1152: 72}


def config_from_shapes(shapes):
    width, channels, patch, _ = shapes["patch_embed.proj.weight"]
    cross = CROSS_HEADS.get(width, CROSS_HEAD)
    return dict(
        in_channels=channels,
        out_channels=shapes["proj_out.weight"][0] // patch**2,
        num_attention_heads=width // HEAD,
        attention_head_dim=HEAD,
        num_layers=blocks_of(shapes, "transformer_blocks"),
        num_cross_attention_heads=width // cross,
        cross_attention_head_dim=cross,
        cross_attention_dim=shapes["transformer_blocks.0.attn2.to_k.weight"][1],
        caption_channels=shapes["caption_projection.linear_1.weight"][1],
        mlp_ratio=shapes["transformer_blocks.0.ff.conv_point.weight"][1] / width,
        attention_bias="transformer_blocks.0.attn1.to_q.bias" in shapes,
        patch_size=patch,
        qk_norm="rms_norm_across_heads" if "transformer_blocks.0.attn1.norm_q.weight" in shapes else None,
        guidance_embeds="time_embed.guidance_embedder.linear_1.weight" in shapes,
        timestep_scale=1.0,
    )


LAYOUT = Layout(
    signature=(
        "patch_embed.proj.weight",
        "caption_norm.weight",
        "time_embed.linear.weight",
        "transformer_blocks.0.ff.conv_depth.weight",
        "transformer_blocks.0.attn2.to_k.weight",
        "proj_out.weight",
    ),
    absent=("transformer_blocks.0.ff.conv_temp.weight", "rope.freqs_cos"),  # SANA-Video
    config=config_from_shapes,
)
FAMILY = Family(
    name="sana",
    transformer="SanaTransformer2DModel",
    latent=Latent(frames=False, pixels=constant(1, 32, 32)),
    io=ModelIO(arguments=forward_args, prepare=prepare),
    blocks=Blocks(
        output_layer="proj_out", lists={"transformer_blocks": APART}, attention=("linear", "cross", "halo")
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "attention_mask"),
        widths=entries(c_crossattn="caption_channels"),
    ),
    cache=Cache(
        prompt_modules=("caption_projection", "caption_norm"),
        step_modules=("time_embed",),
        image_modules=("patch_embed",),
        token_modules=("patch_embed.proj",),
        prompt_layers=("attn2.to_k", "attn2.to_v"),
    ),
    build=Build(
        dtypes=BF16_OR_FP16,
        patch_module=patch_module,
        only={
            "guidance_embeds": (False, "SANA-Sprint, a consistency model whose output no solver here reads")
        },
    ),
    layout=LAYOUT,
)
