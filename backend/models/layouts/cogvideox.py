"""CogVideoX in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of

HEAD = 64


def config(shapes):
    """Arguments of CogVideoXTransformer3DModel; 1.5 has a linear patch embedding over two frames."""
    embedding, time, learned = (
        shapes["patch_embed.proj.weight"],
        1 if len(shapes["patch_embed.proj.weight"]) == 4 else 2,
        "patch_embed.pos_embedding" in shapes,
    )
    return dict(
        num_attention_heads=embedding[0] // HEAD,
        attention_head_dim=HEAD,
        in_channels=embedding[1] if time == 1 else embedding[1] // 8,
        out_channels=shapes["proj_out.weight"][0] // (4 * time),
        sample_height=60,
        sample_width=90,
        time_embed_dim=shapes["time_embedding_linear_1.weight"][0],
        ofs_embed_dim=shapes.get("ofs_embedding_linear_1.weight", (None, None))[1],
        text_embed_dim=shapes["patch_embed.text_proj.weight"][1],
        num_layers=blocks_of(shapes, "blocks"),
        patch_size=2,
        patch_size_t=None if time == 1 else 2,
        patch_bias="patch_embed.proj.bias" in shapes,
        use_rotary_positional_embeddings=not learned,
        use_learned_positional_embeddings=learned,
    )


block = "transformer_blocks.{}"
LAYOUT = Layout(
    signature=(
        "patch_embed.proj.weight",
        "patch_embed.text_proj.weight",
        "time_embedding_linear_1.weight",
        "blocks.0.norm1.linear.weight",
        "blocks.0.attn_out.weight",
        "proj_out.weight",
    ),
    absent=(),
    variants={"patch_embed.pos_embedding": "CogVideoX 1.0 image to video (learned positions)"},
    config=config,
    names={
        "time_embedding_linear_1": "time_embedding.linear_1",
        "time_embedding_linear_2": "time_embedding.linear_2",
        "ofs_embedding_linear_1": "ofs_embedding.linear_1",
        "ofs_embedding_linear_2": "ofs_embedding.linear_2",
        **{
            f"blocks.{{}}.{theirs}": f"{block}.{ours}"
            for theirs, ours in {
                "norm1.linear": "norm1.linear",
                "norm1.norm": "norm1.norm",
                "norm2.linear": "norm2.linear",
                "norm2.norm": "norm2.norm",
                "q": "attn1.to_q",
                "k": "attn1.to_k",
                "v": "attn1.to_v",
                "norm_q": "attn1.norm_q",
                "norm_k": "attn1.norm_k",
                "attn_out": "attn1.to_out.0",
                "ff_proj": "ff.net.0.proj",
                "ff_out": "ff.net.2",
            }.items()
        },
    },
)
