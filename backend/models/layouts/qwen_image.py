"""Qwen-Image in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of

#: Of a file whose model knows reference pictures by timestep zero (Edit 2511).
ZERO_TIMESTEP = "__index_timestep_zero__"


def config(shapes):
    """Arguments of QwenImageTransformer2DModel; RoPE axes are (16, 56, 56)/128 of the head size."""
    hidden, head = shapes["img_in.weight"][0], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    axis = 56 * head // 128 // 2 * 2
    return dict(
        patch_size=2,
        in_channels=shapes["img_in.weight"][1],
        out_channels=shapes["proj_out.weight"][0] // 4,
        num_layers=blocks_of(shapes, "transformer_blocks"),
        attention_head_dim=head,
        num_attention_heads=hidden // head,
        joint_attention_dim=shapes["txt_in.weight"][1],
        axes_dims_rope=(head - 2 * axis, axis, axis),
        zero_cond_t=ZERO_TIMESTEP in shapes,
    )


LAYOUT = Layout(
    signature=(
        "img_in.weight",
        "txt_norm.weight",
        "txt_in.weight",
        "transformer_blocks.0.img_mod.1.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "proj_out.weight",
    ),
    absent=(),
    variants={"time_text_embed.addition_t_embedding.weight": "Qwen-Image-Layered"},
    config=config,
    names={},  # the file has diffusers' names
)
