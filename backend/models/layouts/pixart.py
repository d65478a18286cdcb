"""PixArt in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of

HEADS = 16


def config(shapes):
    """Arguments of PixArtTransformer2DModel."""
    hidden, channels, patch, _ = shapes["x_embedder.proj.weight"]
    return dict(
        num_attention_heads=HEADS,
        attention_head_dim=hidden // HEADS,
        in_channels=channels,
        out_channels=shapes["final_layer.linear.weight"][0] // patch**2,
        num_layers=blocks_of(shapes, "blocks"),
        cross_attention_dim=hidden,
        sample_size=128,
        patch_size=patch,
        caption_channels=shapes["y_embedder.y_proj.fc1.weight"][1],
        use_additional_conditions="csize_embedder.mlp.0.weight" in shapes,
    )


block, time = "transformer_blocks.{}", "adaln_single.emb"
LAYOUT = Layout(
    signature=(
        "x_embedder.proj.weight",
        "t_block.1.weight",
        "y_embedder.y_proj.fc1.weight",
        "blocks.0.scale_shift_table",
        "blocks.0.cross_attn.kv_linear.weight",
        "final_layer.linear.weight",
    ),
    absent=(),
    config=config,
    names={
        "x_embedder.proj": "pos_embed.proj",
        "t_block.1": "adaln_single.linear",
        "final_layer.linear": "proj_out",
        "final_layer.scale_shift_table": "scale_shift_table",
        "t_embedder.mlp.0": f"{time}.timestep_embedder.linear_1",
        "t_embedder.mlp.2": f"{time}.timestep_embedder.linear_2",
        "csize_embedder.mlp.0": f"{time}.resolution_embedder.linear_1",
        "csize_embedder.mlp.2": f"{time}.resolution_embedder.linear_2",
        "ar_embedder.mlp.0": f"{time}.aspect_ratio_embedder.linear_1",
        "ar_embedder.mlp.2": f"{time}.aspect_ratio_embedder.linear_2",
        "y_embedder.y_proj.fc1": "caption_projection.linear_1",
        "y_embedder.y_proj.fc2": "caption_projection.linear_2",
        "blocks.{}.scale_shift_table": f"{block}.scale_shift_table",
        "blocks.{}.attn.qkv": f"{block}.attn1.to_q {block}.attn1.to_k {block}.attn1.to_v",
        "blocks.{}.attn.proj": f"{block}.attn1.to_out.0",
        "blocks.{}.cross_attn.q_linear": f"{block}.attn2.to_q",
        "blocks.{}.cross_attn.kv_linear": f"{block}.attn2.to_k {block}.attn2.to_v",
        "blocks.{}.cross_attn.proj": f"{block}.attn2.to_out.0",
        "blocks.{}.mlp.fc1": f"{block}.ff.net.0.proj",
        "blocks.{}.mlp.fc2": f"{block}.ff.net.2",
    },
)
