"""Kandinsky 5 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of Kandinsky5Transformer3DModel; RoPE axes are (2, 3, 3)/8 of the head size. Video models
    have 16 + 1 more channels."""
    width, embedding = shapes["visual_embeddings.in_layer.weight"]
    out, head = (
        shapes["out_layer.out_layer.weight"][0] // 4,
        shapes["visual_transformer_blocks.0.cross_attention.key_norm.weight"][0],
    )
    axis = 3 * head // 8
    return dict(
        in_visual_dim=out,
        out_visual_dim=out,
        in_text_dim=shapes["text_embeddings.in_layer.weight"][1],
        in_text_dim2=shapes["pooled_text_embeddings.in_layer.weight"][1],
        visual_cond=embedding > 4 * out,
        time_dim=shapes["time_embeddings.in_layer.weight"][0],
        model_dim=width,
        ff_dim=shapes["visual_transformer_blocks.0.feed_forward.in_layer.weight"][0],
        patch_size=(1, 2, 2),
        num_text_blocks=blocks_of(shapes, "text_transformer_blocks"),
        num_visual_blocks=blocks_of(shapes, "visual_transformer_blocks"),
        axes_dims=(head - 2 * axis, axis, axis),
    )


LAYOUT = Layout(
    signature=(
        "visual_embeddings.in_layer.weight",
        "pooled_text_embeddings.in_layer.weight",
        "visual_transformer_blocks.0.cross_attention.key_norm.weight",
        "text_transformer_blocks.0.text_modulation.out_layer.weight",
        "out_layer.out_layer.weight",
    ),
    absent=(),
    config=config,
    names={},  # the file has diffusers' names
)
