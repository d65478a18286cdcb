"""HiDream I1 (full, dev, fast) of HiDream.ai: 16 double-stream and 32 single-stream blocks with experts; text
last, of which every block reads a layer of Llama anew."""

from .calls.hidream import adjust, forward_args
from .layouts.hidream import LAYOUT
from .spec import Family

FAMILY = Family(
    name="hidream",
    transformer="HiDreamImageTransformer2DModel",
    prediction="flow",
    block_lists=("double_stream_blocks", "single_stream_blocks"),
    joined=("single_stream_blocks",),
    text="encoder_hidden_states",
    text_position="last",
    fresh_text=lambda arguments: arguments["encoder_hidden_states_llama3"][0].shape[1],
    text_needs_a_row=True,
    counts_image=True,
    returns=("image", "text"),
    modulation=("block.adaLN_modulation.1",),
    prompt_modules=("caption_projection.*.linear",),
    per_token={"image_rotary_emb": ("joint", 1)},
    text_layers=("block.attn1.to_*_t", "block.ff_t.*"),
    shares={
        "block.ff_i.experts.*": lambda config: config["num_activated_experts"] / config["num_routed_experts"]
    },
    adjust=adjust,
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    conditioning=("c_crossattn", "y", "encoder_hidden_states_llama3"),
    required=("c_crossattn", "y", "encoder_hidden_states_llama3"),
    widths=lambda config: {
        "c_crossattn": config["caption_channels"][0],
        "encoder_hidden_states_llama3": config["caption_channels"][1],
        "y": config["text_emb_dim"],
    },
    forward_args=forward_args,
    output=lambda output, grid: -grid.padded.to_tokens(output),
    tp_plan={
        **{f"*.attn1.to_{name}": "colwise" for name in ("q", "k", "v", "q_t", "k_t", "v_t")},
        "*.attn1.to_out": "rowwise",
        "*.attn1.to_out_t": "rowwise",
        "*.q_rms_norm*": "norm",
        "*.k_rms_norm*": "norm",
        "*.w1": "colwise",
        "*.w3": "colwise",
        "*.w2": "rowwise",
    },
    layout=LAYOUT,
)
