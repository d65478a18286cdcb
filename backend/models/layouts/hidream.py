"""HiDream in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of

#: Width of the released size, and the sizes of a head there and in narrower files: norms span all heads, so
#: no shape tells.
RELEASED, HEAD, NARROW = 2560, 128, 32


def config(shapes):
    """Arguments of HiDreamImageTransformer2DModel; RoPE axes are (4, 2, 2)/8 of the head size, and two
    experts are asked."""
    width, double, single = (
        shapes["x_embedder.proj.weight"][0],
        blocks_of(shapes, "double_stream_blocks"),
        blocks_of(shapes, "single_stream_blocks"),
    )
    head = HEAD if width >= RELEASED else NARROW
    out = shapes["final_layer.linear.weight"][0] // 4
    return dict(
        patch_size=2,
        in_channels=shapes["x_embedder.proj.weight"][1] // 4,
        out_channels=out,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=head,
        num_attention_heads=width // head,
        caption_channels=[shapes[f"caption_projection.{i}.linear.weight"][1] for i in (double + single, 0)],
        text_emb_dim=shapes["p_embedder.pooled_embedder.linear_1.weight"][1],
        num_routed_experts=shapes["double_stream_blocks.0.block.ff_i.gate.weight"][0],
        num_activated_experts=2,
        axes_dims_rope=(head // 2, head // 4, head // 4),
        max_resolution=(128, 128),
        llama_layers=tuple(range(double + single)),
    )


LAYOUT = Layout(
    signature=(
        "x_embedder.proj.weight",
        "caption_projection.0.linear.weight",
        "double_stream_blocks.0.block.ff_i.gate.weight",
        "single_stream_blocks.0.block.attn1.q_rms_norm.weight",
        "final_layer.linear.weight",
    ),
    absent=(),
    config=config,
    names={},  # the file has diffusers' names
)
