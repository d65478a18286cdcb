"""HunyuanVideo 1.5 of Tencent: 54 double-stream blocks; three kinds of text (image features, byT5, Qwen) are
joined inside the model."""

from .calls.hunyuan_video15 import adjust, forward_args, refusal
from .layouts.hunyuan_video15 import LAYOUT
from .plans import COMMON, TEXT_LAYERS
from .spec import Family

FAMILY = Family(
    name="hunyuan-video-1.5",
    transformer="HunyuanVideo15Transformer3DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    text="encoder_hidden_states",
    text_position="last",
    text_mask="attention_mask",
    text_needs_a_row=True,
    returns=("image", "text"),
    text_layers=TEXT_LAYERS,
    modulation=("norm1.linear", "norm1_context.linear"),
    per_token={"freqs_cis": ("image", 0)},
    adjust=adjust,
    clean_inpaint=True,
    patch=lambda config: (config["patch_size_t"], config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["out_channels"],
    frames=True,
    conditioning=("c_crossattn", "attention_mask", "txt_byt5", "clip_fea", "c_concat", "guidance", "y"),
    ignored=("guidance", "y"),
    required=("c_crossattn",),
    only={
        "use_meanflow": (False, "a HunyuanVideo 1.5 distilled by MeanFlow, which is told where a step ends,")
    },
    widths=lambda config: {
        "c_crossattn": config["text_embed_dim"],
        "txt_byt5": config["text_embed_2_dim"],
        "clip_fea": config["image_embed_dim"],
    },
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: grid.padded.to_tokens(output),
    layout=LAYOUT,
    tp_plan=COMMON,
)
