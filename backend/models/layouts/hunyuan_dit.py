"""HunyuanDiT in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of

HEADS = 16


def config(shapes):
    """Arguments of HunyuanDiT2DModel."""
    hidden, channels, patch, _ = shapes["x_embedder.proj.weight"]
    return dict(
        num_attention_heads=HEADS,
        attention_head_dim=hidden // HEADS,
        in_channels=channels,
        patch_size=patch,
        hidden_size=hidden,
        num_layers=blocks_of(shapes, "blocks"),
        mlp_ratio=shapes["blocks.0.mlp.fc1.weight"][0] / hidden,
        learn_sigma=shapes["final_layer.linear.weight"][0] > channels * patch**2,
        cross_attention_dim=shapes["text_embedding_padding"][1],
        cross_attention_dim_t5=shapes["mlp_t5.0.weight"][1],
        pooled_projection_dim=shapes["pooler.c_proj.weight"][0],
        use_style_cond_and_image_meta_size="style_embedder.weight" in shapes,
    )


block, extra = "blocks.{}", "time_extra_emb"
LAYOUT = Layout(
    signature=(
        "mlp_t5.0.weight",
        "text_embedding_padding",
        "pooler.positional_embedding",
        "x_embedder.proj.weight",
        "extra_embedder.0.weight",
        "blocks.0.attn1.Wqkv.weight",
        "final_layer.linear.weight",
    ),
    absent=(),
    config=config,
    swapped=("norm_out.linear",),
    names={
        "mlp_t5.0": "text_embedder.linear_1",
        "mlp_t5.2": "text_embedder.linear_2",
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": f"{extra}.timestep_embedder.linear_1",
        "t_embedder.mlp.2": f"{extra}.timestep_embedder.linear_2",
        "extra_embedder.0": f"{extra}.extra_embedder.linear_1",
        "extra_embedder.2": f"{extra}.extra_embedder.linear_2",
        "style_embedder.weight": f"{extra}.style_embedder.weight",
        "pooler.positional_embedding": f"{extra}.pooler.positional_embedding",
        **{f"pooler.{part}_proj": f"{extra}.pooler.{part}_proj" for part in "qkvc"},
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        f"{block}.norm1": f"{block}.norm1.norm",
        f"{block}.default_modulation.1": f"{block}.norm1.linear",
        f"{block}.norm3": f"{block}.norm2",
        f"{block}.norm2": f"{block}.norm3",
        f"{block}.attn1.Wqkv": f"{block}.attn1.to_q {block}.attn1.to_k {block}.attn1.to_v",
        f"{block}.attn2.q_proj": f"{block}.attn2.to_q",
        f"{block}.attn2.kv_proj": f"{block}.attn2.to_k {block}.attn2.to_v",
        **{
            f"{block}.{attention}.{theirs}": f"{block}.{attention}.{ours}"
            for attention in ("attn1", "attn2")
            for theirs, ours in (("q_norm", "norm_q"), ("k_norm", "norm_k"), ("out_proj", "to_out.0"))
        },
        f"{block}.mlp.fc1": f"{block}.ff.net.0.proj",
        f"{block}.mlp.fc2": f"{block}.ff.net.2",
    },
)
