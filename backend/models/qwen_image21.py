"""Qwen-Image 2.1 of Alibaba, with reference pictures: 32 blocks over one sequence of text, references and
image, of which the image alone attends to what follows."""

from .calls.qwen_image21 import adjust, forward_args, refusal, text_rows
from .layouts.qwen_image21 import LAYOUT
from .spec import Family

FAMILY = Family(
    name="qwen-image-2.1",
    transformer="QwenImage21Transformer2DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    joined=("transformer_blocks",),
    text_position="first",  # and references among it
    once=True,
    variant=lambda config: (
        {} if config.get("causal_condition", True) else {"once": False}
    ),  # the text is modulated by the step
    text_rows=text_rows,
    returns=("image",),
    attention=("text", ("image", "joint")),
    per_token={"rotary_emb": ("joint", 0), "target_token_mask": ("joint", 0)},
    prompt_modules=("txt_in",),
    adjust=adjust,
    patch=lambda config: (1, 1, 1),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    conditioning=("c_crossattn", "attention_mask", "ref_latents", "ref_latents_method", "image_slots"),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["context_in_dim"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output[:, -grid.tokens :],
    layout=LAYOUT,
)
