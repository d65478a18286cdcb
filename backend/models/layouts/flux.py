"""Flux.1 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout


def config(shapes):
    """Arguments of FluxTransformer2DModel from the tensors' shapes; RoPE axes are (16, 56, 56)/128 of the
    head size."""

    def count(prefix):
        return len({key.split(".")[1] for key in shapes if key.startswith(prefix)})

    hidden, head = shapes["img_in.weight"][0], shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    image_axis = 56 * head // 128 // 2 * 2
    return dict(
        in_channels=shapes["img_in.weight"][1],
        out_channels=shapes["final_layer.linear.weight"][0],
        num_layers=count("double_blocks."),
        num_single_layers=count("single_blocks."),
        attention_head_dim=head,
        num_attention_heads=hidden // head,
        joint_attention_dim=shapes["txt_in.weight"][1],
        pooled_projection_dim=shapes["vector_in.in_layer.weight"][1],
        guidance_embeds="guidance_in.in_layer.weight" in shapes,
        axes_dims_rope=(head - 2 * image_axis, image_axis, image_axis),
    )


double, single = "transformer_blocks.{}", "single_transformer_blocks.{}"
LAYOUT = Layout(
    signature=(
        "img_in.weight",
        "double_blocks.0.img_attn.qkv.weight",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "single_blocks.0.linear1.weight",
        "vector_in.in_layer.weight",
        "txt_in.weight",
    ),
    absent=("distilled_guidance_layer.in_proj.weight",),
    config=config,
    swapped=("norm_out.linear",),
    names={
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        "double_blocks.{}.img_mod.lin": f"{double}.norm1.linear",
        "double_blocks.{}.txt_mod.lin": f"{double}.norm1_context.linear",
        "double_blocks.{}.img_attn.qkv": f"{double}.attn.to_q {double}.attn.to_k {double}.attn.to_v",
        "double_blocks.{}.txt_attn.qkv": f"{double}.attn.add_q_proj {double}.attn.add_k_proj "
        f"{double}.attn.add_v_proj",
        "double_blocks.{}.img_attn.norm.query_norm.scale": f"{double}.attn.norm_q.weight",
        "double_blocks.{}.img_attn.norm.key_norm.scale": f"{double}.attn.norm_k.weight",
        "double_blocks.{}.txt_attn.norm.query_norm.scale": f"{double}.attn.norm_added_q.weight",
        "double_blocks.{}.txt_attn.norm.key_norm.scale": f"{double}.attn.norm_added_k.weight",
        "double_blocks.{}.img_attn.proj": f"{double}.attn.to_out.0",
        "double_blocks.{}.txt_attn.proj": f"{double}.attn.to_add_out",
        "double_blocks.{}.img_mlp.0": f"{double}.ff.net.0.proj",
        "double_blocks.{}.img_mlp.2": f"{double}.ff.net.2",
        "double_blocks.{}.txt_mlp.0": f"{double}.ff_context.net.0.proj",
        "double_blocks.{}.txt_mlp.2": f"{double}.ff_context.net.2",
        "single_blocks.{}.modulation.lin": f"{single}.norm.linear",
        "single_blocks.{}.linear1": f"{single}.attn.to_q {single}.attn.to_k {single}.attn.to_v "
        f"{single}.proj_mlp",
        "single_blocks.{}.linear2": f"{single}.proj_out",
        "single_blocks.{}.norm.query_norm.scale": f"{single}.attn.norm_q.weight",
        "single_blocks.{}.norm.key_norm.scale": f"{single}.attn.norm_k.weight",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
    },
)
