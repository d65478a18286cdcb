"""Flux.2 of Black Forest Labs (dev, klein), with reference pictures: double- and single-stream blocks that
share their modulation; no pooled prompt, latents of 128 channels."""

from .calls import references
from .calls.flux2 import adjust, forward_args, refusal
from .layouts.flux2 import LAYOUT
from .plans import COMMON, TEXT_LAYERS
from .spec import Family

FAMILY = Family(
    name="flux2",
    transformer="Flux2Transformer2DModel",
    prediction="flow",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    joined=("single_transformer_blocks",),
    text="encoder_hidden_states",
    text_position="first",
    counts_text=True,
    returns=("text", "image"),
    per_token={"image_rotary_emb": ("joint", 0)},
    text_layers=TEXT_LAYERS,
    tp_plan={
        "*.linear_in": "gated colwise",
        "*.linear_out": "rowwise",
        "*.to_qkv_mlp_proj": "packed colwise",
        "single_transformer_blocks.*.to_out": "rowwise behind attention",
        "single_transformer_blocks.*.norm_?": None,
        **COMMON,
    },
    adjust=adjust,
    patch=lambda config: (1, 1, 1),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    context=references.rows,
    conditioning=("c_crossattn", "guidance", "ref_latents", "ref_latents_method", "y"),
    ignored=("y",),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["joint_attention_dim"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output[:, : grid.tokens],
    layout=LAYOUT,
)
