"""Lumina Image 2.0 of Alpha-VLLM: two blocks over the image, then 26 over one stream of text and image, with
grouped queries; two more refine the prompt."""

from .calls.lumina2 import adjust, forward_args, refusal
from .layouts.lumina2 import LAYOUT
from .plans import COMMON
from .spec import Family

FAMILY = Family(
    name="lumina2",
    transformer="Lumina2Transformer2DModel",
    prediction="flow",
    block_lists=("noise_refiner", "layers"),
    image_first=("noise_refiner",),
    joined=("layers",),
    text_position="first",
    returns=("image",),
    per_token={"image_rotary_emb": ("joint", 1)},
    modulation=("norm1.linear",),
    prompt_modules=("time_caption_embed.caption_embedder", "context_refiner.[0-9]"),
    head_size=lambda config: config["hidden_size"] // config["num_attention_heads"],
    adjust=adjust,
    tp_plan={
        "*.feed_forward.linear_1": "colwise",
        "*.feed_forward.linear_3": "colwise",
        "*.feed_forward.linear_2": "rowwise",
        **COMMON,
    },
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    conditioning=("c_crossattn", "num_tokens", "attention_mask", "clip_text_pooled"),
    ignored=("num_tokens", "attention_mask", "clip_text_pooled"),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["cap_feat_dim"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: -grid.padded.to_tokens(output),
    layout=LAYOUT,
)
