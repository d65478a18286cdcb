"""MiniMax-H3 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of MiniMaxH3Transformer3DModel."""
    head, first = shapes["blocks.0.attn.q_norm.weight"][0], shapes["time_embedder.proj_in.weight"]
    return dict(
        patch_size=(1, 2, 2),
        hidden_size=shapes["video_patch_proj.weight"][0],
        in_channels=shapes["video_patch_proj.weight"][1] // 4,
        audio_in_channels=shapes["audio_patch_proj.weight"][1],
        num_layers=blocks_of(shapes, "blocks"),
        num_refiner_layers=blocks_of(shapes, "token_refiner.blocks"),
        attention_head_dim=head,
        num_attention_heads=shapes["blocks.0.attn.qkv_proj.weight"][0] // (3 * head),
        ffn_dim=shapes["blocks.0.mlp.fc2.weight"][1],
        text_dim=shapes["condition_proj.weight"][1],
        freq_dim=first[1],
        time_embed_hidden_dim=first[0],
        time_embed_dim=shapes["time_embedder.proj_out.weight"][0],
        rope_freq_dim=shapes["rope.inv_freq"][0],
    )


def block(theirs, ours):
    return {
        f"{theirs}.{{}}.attn.qkv_proj": " ".join(f"{ours}.{{}}.attn.to_{part}" for part in "qkv"),
        f"{theirs}.{{}}.attn.out_proj": f"{ours}.{{}}.attn.to_out.0",
        f"{theirs}.{{}}.attn.q_norm": f"{ours}.{{}}.attn.norm_q",
        f"{theirs}.{{}}.attn.k_norm": f"{ours}.{{}}.attn.norm_k",
        f"{theirs}.{{}}.mlp.fc1": f"{ours}.{{}}.ff.net.0.proj",
        f"{theirs}.{{}}.mlp.fc2": f"{ours}.{{}}.ff.net.2",
        **{
            f"{theirs}.{{}}.{name}": f"{ours}.{{}}.{name}" for name in ("norm1", "norm2", "adaln_proj.linear")
        },
    }


LAYOUT = Layout(
    signature=(
        "video_patch_proj.weight",
        "audio_patch_proj.weight",
        "time_embedder.proj_in.weight",
        "token_refiner.blocks.0.attn.qkv_proj.weight",
        "blocks.0.adaln_proj.linear.weight",
        "final_layer.audio_out.weight",
    ),
    absent=(),
    config=config,
    swapped=("transformer_blocks.{}.ff.net.0.proj", "token_refiner.refiner_blocks.{}.ff.net.0.proj"),
    names=block("blocks", "transformer_blocks")
    | block("token_refiner.blocks", "token_refiner.refiner_blocks")
    | {
        "video_patch_proj": "proj_in",
        "audio_patch_proj": "audio_proj_in",
        "condition_proj": "context_embedder",
        "time_embedder.proj_in": "time_embedder.linear_1",
        "time_embedder.proj_out": "time_embedder.linear_2",
        "final_layer.norm": "norm_out.norm",
        "final_layer.adaln_proj.linear": "norm_out.linear",
        "final_layer.video_out": "proj_out",
        "final_layer.audio_out": "audio_proj_out",
    },
)
