"""Krea 2, with reference pictures: 28 blocks over one stream of text and image with grouped queries; the
prompt is a stack of the text encoder's layers, fused inside the model."""

from .calls import references
from .calls.krea2 import forward_args, given, refusal
from .layouts.krea2 import LAYOUT
from .plans import COMMON
from .spec import Family

FAMILY = Family(
    name="krea2",
    transformer="Krea2Transformer2DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    joined=("transformer_blocks",),
    text_position="first",
    returns=("image",),
    per_token={"image_rotary_emb": ("joint", 0)},
    patch=lambda config: (1, 2, 2),
    latent_channels=lambda config: config["in_channels"] // 4,
    context=lambda config, grid, cond: references.rows(config, grid, given(cond)),
    conditioning=("c_crossattn", "attention_mask", "ref_latents", "ref_latents_method"),
    ignored=("attention_mask",),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["num_text_layers"] * config["text_hidden_dim"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output[:, : grid.tokens],
    layout=LAYOUT,
    tp_plan=COMMON,
)
