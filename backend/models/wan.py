"""Wan 2.1 and 2.2 of Alibaba, text, image or first and last frame to video, both experts of A14B, 5B: 30 to
40 blocks; the prompt and the image's CLIP features are read through cross-attention."""

from .calls.wan import adjust, forward_args, refusal
from .layouts.wan import LAYOUT
from .plans import COMMON
from .spec import Family

#: Of 2.2's 5B, which is given frames by a timestep of their own.
GIVEN_FRAMES = {
    "clean_inpaint": True,
    "conditioning": ("c_crossattn", "denoise_mask", "clip_fea"),
    "per_token": {"rotary_emb": ("image", 1), "temb": ("image", 1, 4)},
}
FAMILY = Family(
    name="wan",
    transformer="WanTransformer3DModel",
    prediction="flow",
    block_lists=("blocks",),
    returns=("image",),
    per_token={"rotary_emb": ("image", 1)},
    adjust=adjust,
    variant=lambda config: GIVEN_FRAMES if config["out_channels"] == 48 else {},
    attention=("image", "cross", "cross"),
    prompt_only=("attn2.to_k", "attn2.to_v", "attn2.add_k_proj", "attn2.add_v_proj"),
    refusal=refusal,
    patch=lambda config: tuple(config["patch_size"]),
    latent_channels=lambda config: config["out_channels"],
    frames=True,
    conditioning=("c_crossattn", "c_concat", "clip_fea"),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["text_dim"]},
    forward_args=forward_args,
    output=lambda output, grid: grid.padded.to_tokens(output),
    layout=LAYOUT,
    tp_plan=COMMON,
)
