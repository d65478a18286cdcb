"""Ideogram 4: 34 blocks over one stream of text and image; the prompt is thirteen layers of the text encoder
side by side, latents have 128 channels."""

from .calls.ideogram4 import adjust, forward_args, output
from .layouts.ideogram4 import LAYOUT
from .plans import COMMON
from .spec import Family

FAMILY = Family(
    name="ideogram4",
    transformer="Ideogram4Transformer2DModel",
    prediction="flow",
    block_lists=("layers",),
    joined=("layers",),
    text_position="first",
    returns=("image",),
    shares={"adaln_modulation": lambda config: 0},
    per_token={"image_rotary_emb": ("joint", 1)},
    adjust=adjust,
    tp_plan=COMMON,
    patch=lambda config: (1, 1, 1),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    conditioning=("c_crossattn", "attention_mask"),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["llm_features_dim"]},
    forward_args=forward_args,
    output=output,
    layout=LAYOUT,
)
