"""Ideogram 4 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of

#: Frequencies of the position axes (time, height, width).
SECTIONS = (24, 20, 20)


def config(shapes):
    """Arguments of Ideogram4Transformer2DModel."""
    hidden, channels = shapes["input_proj.weight"]
    head = shapes["layers.0.attention.norm_q.weight"][0]
    most = [(head // 2 - 1 - axis) // 3 + 1 for axis in range(3)]
    return dict(
        in_channels=channels,
        num_layers=blocks_of(shapes, "layers"),
        attention_head_dim=head,
        num_attention_heads=hidden // head,
        intermediate_size=shapes["layers.0.feed_forward.w1.weight"][0],
        adaln_dim=shapes["adaln_proj.weight"][0],
        llm_features_dim=shapes["llm_cond_norm.weight"][0],
        mrope_section=tuple(map(min, SECTIONS, most)),
    )


LAYOUT = Layout(
    signature=(
        "input_proj.weight",
        "llm_cond_norm.weight",
        "embed_image_indicator.weight",
        "layers.0.attention.qkv.weight",
        "layers.0.adaln_modulation.weight",
        "final_layer.linear.weight",
    ),
    absent=(),
    config=config,
    names={
        "layers.{}.attention.qkv": " ".join(f"layers.{{}}.attention.to_{part}" for part in "qkv"),
        "layers.{}.attention.o": "layers.{}.attention.to_out.0",
    },
)
