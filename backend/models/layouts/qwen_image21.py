"""Qwen-Image 2.1 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of QwenImage21Transformer2DModel; RoPE axes are (16, 56, 56)/128 of the head size."""
    hidden, head = shapes["img_in.weight"][0], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    axis = 56 * head // 128 // 2 * 2
    return dict(
        patch_size=1,
        in_channels=shapes["img_in.weight"][1],
        out_channels=shapes["proj_out.weight"][0],
        num_layers=blocks_of(shapes, "transformer_blocks"),
        attention_head_dim=head,
        num_attention_heads=hidden // head,
        context_in_dim=shapes["txt_in.in_layer.weight"][1],
        mlp_ratio=shapes["transformer_blocks.0.img_mlp.gate_up.weight"][0] // 2 // hidden,
        axes_dims_rope=(head - 2 * axis, axis, axis),
    )


LAYOUT = Layout(
    signature=(
        "img_in.weight",
        "txt_in.text_norm.weight",
        "txt_in.in_layer.weight",
        "modulation.1.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "transformer_blocks.0.img_mlp.gate_up.weight",
    ),
    absent=(),
    variants={"control_img_in.weight": "Qwen-Image 2.1 Fun Control"},
    config=config,
    names={
        "transformer_blocks.{}.img_mlp.gate_up": "transformer_blocks.{}.img_mlp.gate_layer "
        "transformer_blocks.{}.img_mlp.proj"
    },
)
