"""Chroma in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of
from . import flux


def config(shapes):
    """Arguments of ChromaTransformer2DModel; RoPE axes are (16, 56, 56)/128 of the head size."""
    hidden, head = shapes["img_in.weight"][0], shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    axis, network = 56 * head // 128 // 2 * 2, "distilled_guidance_layer"
    return dict(
        in_channels=shapes["img_in.weight"][1],
        out_channels=shapes["final_layer.linear.weight"][0],
        num_layers=blocks_of(shapes, "double_blocks"),
        num_single_layers=blocks_of(shapes, "single_blocks"),
        attention_head_dim=head,
        num_attention_heads=hidden // head,
        joint_attention_dim=shapes["txt_in.weight"][1],
        axes_dims_rope=(head - 2 * axis, axis, axis),
        approximator_num_channels=shapes[f"{network}.in_proj.weight"][1],
        approximator_hidden_dim=shapes[f"{network}.in_proj.weight"][0],
        approximator_layers=blocks_of(shapes, f"{network}.layers"),
    )


network = "distilled_guidance_layer"
LAYOUT = Layout(
    signature=(
        "img_in.weight",
        "txt_in.weight",
        f"{network}.in_proj.weight",
        f"{network}.norms.0.scale",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "single_blocks.0.linear1.weight",
        "final_layer.linear.weight",
    ),
    absent=(),
    variants=dict.fromkeys(
        ("img_in_patch.weight", "nerf_final_layer.norm.scale", "nerf_final_layer_conv.norm.scale", "__x0__"),
        "Chroma Radiance, which works on pixels",
    ),
    config=config,
    names=flux.LAYOUT.names
    | {
        f"{network}.layers.{{}}.in_layer": f"{network}.layers.{{}}.linear_1",
        f"{network}.layers.{{}}.out_layer": f"{network}.layers.{{}}.linear_2",
        f"{network}.norms.{{}}.scale": f"{network}.norms.{{}}.weight",
    },
)
