"""LTX-Video of Lightricks (0.9 to 0.9.8), text or image to video: 28 or 48 blocks; one latent pixel a token,
the prompt read through cross-attention."""

from .calls.ltxv import forward_args, refusal
from .layouts.ltxv import LAYOUT
from .plans import COMMON
from .spec import Family

FAMILY = Family(
    name="ltxv",
    transformer="LTXVideoTransformer3DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    returns=("image",),
    per_token={"image_rotary_emb": ("image", 1), "temb": ("image", 1)},
    attention=("image", "cross"),
    prompt_only=("attn2.to_k", "attn2.to_v"),
    clean_inpaint=True,
    patch=lambda config: (1, 1, 1),
    latent_channels=lambda config: config["in_channels"],
    frames=True,
    conditioning=("c_crossattn", "attention_mask", "frame_rate", "denoise_mask", "keyframe_idxs"),
    required=("c_crossattn",),
    precise=("frame_rate",),
    widths=lambda config: {"c_crossattn": config["caption_channels"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output,
    layout=LAYOUT,
    tp_plan=COMMON,
    per_feature=("image_rotary_emb",),
)
