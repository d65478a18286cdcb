"""MiniMax-H3: 50 blocks over one stream of text, stereo audio and video; both latents are denoised at once,
each on a noise schedule of its own."""

from .calls.minimax_h3 import adjust, carry, forward_args, output, refusal, text_rows
from .layouts.minimax_h3 import LAYOUT
from .plans import COMMON
from .spec import Family, Nested

FAMILY = Family(
    name="minimax-h3",
    transformer="MiniMaxH3Transformer3DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    joined=("transformer_blocks",),
    text_position="first",
    returns=("image",),
    per_token={"adaln_indices": ("joint", 0), "rotary_emb": ("joint", 0)},
    modulation=("adaln_proj.linear",),
    modulation_shared=True,
    float32=("proj_in.*", "audio_proj_in.*", "time_embedder.*", "proj_out.*", "audio_proj_out.*"),
    prompt_modules=("context_embedder", "token_refiner"),
    adjust=adjust,
    tp_plan={"*.ff.net.0.proj": "gated colwise", **COMMON},
    patch=lambda config: tuple(config["patch_size"]),
    latent_channels=lambda config: config["in_channels"],
    nested=Nested(
        ("video", "audio"),
        patches=lambda config: (tuple(config["patch_size"]), (1, 1, 1)),
        channels=lambda config: (config["in_channels"], config["audio_in_channels"]),
        order=(1, 0),
        carry=carry,
    ),
    conditioning=(
        "c_crossattn",
        "text_tags",
        "given_video",
        "given_audio",
        "given_tags",
        "given_positions",
        "given_times",
        "origin",
    ),
    precise=("given_video", "given_audio", "given_positions", "given_times", "origin"),
    text_rows=text_rows,
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["text_dim"]},
    width=lambda config: config["hidden_size"],
    refusal=refusal,
    forward_args=forward_args,
    output=output,
    layout=LAYOUT,
)
