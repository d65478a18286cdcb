"""SANA in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of

#: Size of a head of linear attention, and of cross-attention by the width of the model (which no shape
#: tells).
HEAD, CROSS_HEAD, CROSS_HEADS = 32, 112, {1152: 72}


def config(shapes):
    """Arguments of SanaTransformer2DModel."""
    width, channels, patch, _ = shapes["patch_embed.proj.weight"]
    cross = CROSS_HEADS.get(width, CROSS_HEAD)
    return dict(
        in_channels=channels,
        out_channels=shapes["proj_out.weight"][0] // patch**2,
        num_attention_heads=width // HEAD,
        attention_head_dim=HEAD,
        num_layers=blocks_of(shapes, "transformer_blocks"),
        num_cross_attention_heads=width // cross,
        cross_attention_head_dim=cross,
        cross_attention_dim=shapes["transformer_blocks.0.attn2.to_k.weight"][1],
        caption_channels=shapes["caption_projection.linear_1.weight"][1],
        mlp_ratio=shapes["transformer_blocks.0.ff.conv_point.weight"][1] / width,
        attention_bias="transformer_blocks.0.attn1.to_q.bias" in shapes,
        patch_size=patch,
        qk_norm="rms_norm_across_heads" if "transformer_blocks.0.attn1.norm_q.weight" in shapes else None,
        guidance_embeds="time_embed.guidance_embedder.linear_1.weight" in shapes,
        timestep_scale=1.0,
    )


LAYOUT = Layout(
    signature=(
        "patch_embed.proj.weight",
        "caption_norm.weight",
        "time_embed.linear.weight",
        "transformer_blocks.0.ff.conv_depth.weight",
        "transformer_blocks.0.attn2.to_k.weight",
        "proj_out.weight",
    ),
    absent=("transformer_blocks.0.ff.conv_temp.weight", "rope.freqs_cos"),  # SANA-Video
    config=config,
    names={},  # the file is diffusers'
)
