"""Flux.3 of Black Forest Labs, with reference pictures: blocks for image, references and text, each alone,
then 28 over all; what is given is the same at every step."""

from .calls import references
from .calls.flux3 import adjust, forward_args, refusal
from .layouts.flux3 import LAYOUT
from .plans import COMMON
from .spec import Family

FAMILY = Family(
    name="flux3",
    transformer="Flux3Transformer2DModel",
    prediction="flow",
    block_lists=("mode_blocks.image", "single_transformer_blocks"),
    image_first=("mode_blocks.image",),
    text="encoder_hidden_states",
    text_position="first",
    returns=("text", "image"),
    per_token={"image_rotary_emb": ("joint", 0), "temb_mod": ("image", 1)},
    context=references.rows,
    float32=("*.norm_q.weight", "*.norm_k.weight"),
    prompt_modules=(
        "context_embedder",
        "txt_mode_blocks.[0-9]",
        "x_embedders.image_cond",
        "mode_blocks.image_cond.[0-9]",
    ),
    adjust=adjust,
    tp_plan={"*.linear_in": "gated colwise", "*.linear_out": "rowwise", **COMMON},
    patch=lambda config: (1, 1, 1),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    conditioning=("c_crossattn", "ref_latents"),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["joint_attention_dim"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output,
    layout=LAYOUT,
)
