"""Flux.2 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of Flux2Transformer2DModel; RoPE has four equal axes."""
    hidden, head = shapes["img_in.weight"][0], shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    axis = head // 4 // 2 * 2
    return dict(
        in_channels=shapes["img_in.weight"][1],
        out_channels=shapes["final_layer.linear.weight"][0],
        num_layers=blocks_of(shapes, "double_blocks"),
        num_single_layers=blocks_of(shapes, "single_blocks"),
        attention_head_dim=head,
        num_attention_heads=hidden // head,
        joint_attention_dim=shapes["txt_in.weight"][1],
        timestep_guidance_channels=shapes["time_in.in_layer.weight"][1],
        mlp_ratio=shapes["double_blocks.0.img_mlp.2.weight"][1] / hidden,
        guidance_embeds="guidance_in.in_layer.weight" in shapes,
        axes_dims_rope=(head - 3 * axis, axis, axis, axis),
    )


double, single = "transformer_blocks.{}", "single_transformer_blocks.{}"
LAYOUT = Layout(
    signature=(
        "img_in.weight",
        "txt_in.weight",
        "double_stream_modulation_img.lin.weight",
        "single_stream_modulation.lin.weight",
        "double_blocks.0.img_attn.qkv.weight",
        "single_blocks.0.linear1.weight",
    ),
    absent=("vector_in.in_layer.weight",),
    config=config,
    swapped=("norm_out.linear",),
    spellings=(("query_norm.weight", "query_norm.scale"), ("key_norm.weight", "key_norm.scale")),
    names={
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        **{
            f"{theirs}_in.{layer}_layer": f"time_guidance_embed.{ours}.linear_{i}"
            for theirs, ours in (("time", "timestep_embedder"), ("guidance", "guidance_embedder"))
            for i, layer in ((1, "in"), (2, "out"))
        },
        **{
            f"{name}.lin": f"{name}.linear"
            for name in (
                "double_stream_modulation_img",
                "double_stream_modulation_txt",
                "single_stream_modulation",
            )
        },
        "double_blocks.{}.img_attn.qkv": f"{double}.attn.to_q {double}.attn.to_k {double}.attn.to_v",
        "double_blocks.{}.txt_attn.qkv": f"{double}.attn.add_q_proj {double}.attn.add_k_proj "
        f"{double}.attn.add_v_proj",
        "double_blocks.{}.img_attn.norm.query_norm.scale": f"{double}.attn.norm_q.weight",
        "double_blocks.{}.img_attn.norm.key_norm.scale": f"{double}.attn.norm_k.weight",
        "double_blocks.{}.txt_attn.norm.query_norm.scale": f"{double}.attn.norm_added_q.weight",
        "double_blocks.{}.txt_attn.norm.key_norm.scale": f"{double}.attn.norm_added_k.weight",
        "double_blocks.{}.img_attn.proj": f"{double}.attn.to_out.0",
        "double_blocks.{}.txt_attn.proj": f"{double}.attn.to_add_out",
        "double_blocks.{}.img_mlp.0": f"{double}.ff.linear_in",
        "double_blocks.{}.img_mlp.2": f"{double}.ff.linear_out",
        "double_blocks.{}.txt_mlp.0": f"{double}.ff_context.linear_in",
        "double_blocks.{}.txt_mlp.2": f"{double}.ff_context.linear_out",
        "single_blocks.{}.linear1": f"{single}.attn.to_qkv_mlp_proj",
        "single_blocks.{}.linear2": f"{single}.attn.to_out",
        "single_blocks.{}.norm.query_norm.scale": f"{single}.attn.norm_q.weight",
        "single_blocks.{}.norm.key_norm.scale": f"{single}.attn.norm_k.weight",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
    },
)
