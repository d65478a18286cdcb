"""Stable Diffusion 3 and 3.5 (medium, large) of Stability AI: 24 or 38 joint blocks, the first 13 of 3.5
medium with a second attention over the image alone."""

from .calls.sd3 import forward_args, refusal
from .layouts.sd3 import LAYOUT
from .plans import COMMON, TEXT_LAYERS
from .spec import Family

FAMILY = Family(
    name="sd3",
    transformer="SD3Transformer2DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    text="encoder_hidden_states",
    text_position="last",
    returns=("text", "image"),
    attention=("joint", "image"),
    text_layers=TEXT_LAYERS,
    modulation=("norm1.linear", "norm1_context.linear"),
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    conditioning=("c_crossattn", "y"),
    required=("c_crossattn", "y"),
    widths=lambda config: {
        "c_crossattn": config["joint_attention_dim"],
        "y": config["pooled_projection_dim"],
    },
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: grid.padded.to_tokens(output),
    layout=LAYOUT,
    tp_plan=COMMON,
)
