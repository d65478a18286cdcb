"""Flux.1 (dev, schnell, Kontext, Fill, Canny, Depth) of Black Forest Labs: 19 double-stream and 38
single-stream blocks in the released size."""

from .calls import references
from .calls.flux import adjust, forward_args, refusal
from .layouts.flux import LAYOUT
from .plans import TEXT_LAYERS
from .spec import Family

FAMILY = Family(
    name="flux",
    transformer="FluxTransformer2DModel",
    prediction="flow",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    text="encoder_hidden_states",
    text_position="first",
    returns=("text", "image"),
    per_token={"image_rotary_emb": ("joint", 0)},
    text_layers=TEXT_LAYERS,
    modulation=("norm1.linear", "norm1_context.linear", "norm.linear"),
    adjust=adjust,
    patch=lambda config: (1, 2, 2),
    latent_channels=lambda config: (config["out_channels"] or config["in_channels"]) // 4,
    frames=False,
    context=references.rows,
    conditioning=("c_crossattn", "y", "guidance", "c_concat", "ref_latents", "ref_latents_method"),
    required=("c_crossattn", "y"),
    widths=lambda config: {
        "c_crossattn": config["joint_attention_dim"],
        "y": config["pooled_projection_dim"],
    },
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output[:, : grid.tokens],
    layout=LAYOUT,
)
