"""Qwen-Image of Alibaba, and its Edit models (2509, 2511, several references): 60 joint blocks in the
released size; text first, rotary tables for image and text."""

from .calls import references
from .calls.qwen_image import adjust, forward_args, refusal
from .layouts.qwen_image import LAYOUT
from .spec import Family

FAMILY = Family(
    name="qwen-image",
    transformer="QwenImageTransformer2DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    text="encoder_hidden_states",
    text_position="first",
    text_mask="encoder_hidden_states_mask",
    text_needs_a_row=True,
    returns=("text", "image"),
    text_layers=("attn.add_*", "attn.to_add_out", "txt_*"),
    modulation=("img_mod.1", "txt_mod.1"),
    per_token={"image_rotary_emb": (("image", "text"), 0), "modulate_index": ("image", 1)},
    context=references.rows,
    variant=lambda config: (
        {"modulation": ()} if config.get("zero_cond_t") else {}
    ),  # two timesteps a call: nothing that one GEMM of all calls could give
    adjust=adjust,
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["in_channels"] // config["patch_size"] ** 2,
    conditioning=("c_crossattn", "attention_mask", "ref_latents", "ref_latents_method"),
    required=("c_crossattn",),
    only={
        "use_additional_t_cond": (False, "Qwen-Image-Layered"),
        "use_layer3d_rope": (False, "Qwen-Image-Layered"),
        "guidance_embeds": (False, "a guidance-distilled Qwen-Image"),
    },
    widths=lambda config: {"c_crossattn": config["joint_attention_dim"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output[:, : grid.tokens],
    layout=LAYOUT,
)
