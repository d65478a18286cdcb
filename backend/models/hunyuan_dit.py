"""HunyuanDiT 1.0 to 1.2 of Tencent: 28 or 40 blocks with long skips from the first half to the second,
v-prediction on a discrete schedule.

A skip crosses every stage boundary between its two blocks. It travels with the activation: placing both
blocks on one stage would send the activation through every stage twice, which doubles the pipeline's latency
and its bubbles, where the skips cost bytes alone.
"""

from .calls.hunyuan_dit import adjust, forward_args, refusal, schedule
from .layouts.hunyuan_dit import LAYOUT
from .plans import COMMON
from .spec import Family

FAMILY = Family(
    name="hunyuan-dit",
    transformer="HunyuanDiT2DModel",
    prediction="v",
    schedule=schedule,
    block_lists=("blocks",),
    returns=("image",),
    per_token={"image_rotary_emb": ("image", 0)},
    attention=("image", "cross"),
    modulation=("norm1.linear",),
    prompt_only=("attn2.to_k", "attn2.to_v"),
    skip="skip",
    skip_source=lambda index, total: total - 1 - index if index > total // 2 else None,
    adjust=adjust,
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    conditioning=(
        "c_crossattn",
        "text_embedding_mask",
        "encoder_hidden_states_t5",
        "text_embedding_mask_t5",
        "image_meta_size",
    ),
    required=("c_crossattn", "encoder_hidden_states_t5"),
    widths=lambda config: {
        "c_crossattn": config["cross_attention_dim"],
        "encoder_hidden_states_t5": config["cross_attention_dim_t5"],
    },
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: grid.padded.to_tokens(output[:, : grid.shape[0]]),
    layout=LAYOUT,
    tp_plan=COMMON,
)
