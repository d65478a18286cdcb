"""HunyuanVideo of Tencent, text or image to video (v1 concat, v2 replace): 20 double-stream and 40
single-stream blocks in the released size; text last, refined inside the model."""

from .calls import hunyuan_guided
from .calls.hunyuan_video import forward_args, refusal
from .layouts.hunyuan_video import LAYOUT
from .plans import COMMON, PARALLEL_MLP, TEXT_LAYERS
from .spec import Family

FAMILY = Family(
    name="hunyuan-video",
    transformer="HunyuanVideoTransformer3DModel",
    prediction="flow",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    text="encoder_hidden_states",
    text_position="last",
    text_needs_a_row=True,
    returns=("image", "text"),
    text_layers=TEXT_LAYERS,
    modulation=("norm1.linear", "norm1_context.linear", "norm.linear"),
    per_token={"freqs_cis": ("image", 0), "image_rotary_emb": ("image", 0)},
    clean_inpaint=True,
    patch=lambda config: (config["patch_size_t"], config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["out_channels"],
    frames=True,
    leading={"num_tokens": ("image",), "num_rows": ("text", "image")},
    adjust=hunyuan_guided.adjust,
    prepare=hunyuan_guided.prepare,
    refusal=refusal,
    conditioning=("c_crossattn", "y", "guidance", "attention_mask", "c_concat", "guiding_frame_index"),
    required=("c_crossattn", "y"),
    widths=lambda config: {"c_crossattn": config["text_embed_dim"]},
    forward_args=forward_args,
    output=lambda output, grid: grid.padded.to_tokens(output),
    layout=LAYOUT,
    tp_plan=COMMON | PARALLEL_MLP,
)
