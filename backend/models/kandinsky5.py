"""Kandinsky 5 of Kandinsky Lab, image and video (lite, pro): 32 to 60 blocks behind two that refine the
prompt at every step; it is read through cross-attention.

Attention is over every row, as in ComfyUI, also where a folder's configuration asks for the sparse one
(NABLA), which has the same weights: files do not tell of it.
"""

from .calls.kandinsky5 import adjust, forward_args, refusal
from .layouts.kandinsky5 import LAYOUT
from .spec import Family

FAMILY = Family(
    name="kandinsky5",
    transformer="Kandinsky5Transformer3DModel",
    prediction="flow",
    block_lists=("visual_transformer_blocks",),
    image="visual_embed",
    returns=("image",),
    per_token={"rope": ("image", 1)},
    attention=("image", "cross"),
    text_layers=(
        "cross_attention.to_key",
        "cross_attention.to_value",
    ),  # text blocks take the timestep, so they change with it
    modulation=("visual_modulation.out_layer",),
    modulation_input="time_embed",
    adjust=adjust,
    patch=lambda config: tuple(config["patch_size"]),
    latent_channels=lambda config: config["out_visual_dim"],
    heads=lambda config: config["model_dim"] // sum(config["axes_dims"]),
    head_size=lambda config: sum(config["axes_dims"]),
    conditioning=("c_crossattn", "y", "c_concat", "time_dim_replace", "attention_mask"),
    ignored=("attention_mask",),
    required=("c_crossattn", "y"),
    widths=lambda config: {"c_crossattn": config["in_text_dim"], "y": config["in_text_dim2"]},
    refusal=refusal,
    forward_args=forward_args,
    tp_plan={
        f"*attention.{name}": style
        for name, style in (
            ("to_query", "colwise"),
            ("to_key", "colwise"),
            ("to_value", "colwise"),
            ("out_layer", "rowwise"),
        )
    }
    | {"*.feed_forward.in_layer": "colwise", "*.feed_forward.out_layer": "rowwise"},
    output=lambda output, grid: grid.padded.to_tokens(output.movedim(-1, 1)),
    layout=LAYOUT,
)
