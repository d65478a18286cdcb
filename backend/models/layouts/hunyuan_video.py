"""HunyuanVideo in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of HunyuanVideoTransformer3DModel; RoPE axes are (16, 56, 56)/128 of the head size."""
    embedding, head = (
        shapes["img_in.proj.weight"],
        shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0],
    )
    axis = 56 * head // 128 // 2 * 2
    return dict(
        in_channels=embedding[1],
        out_channels=shapes["final_layer.linear.weight"][0] // (embedding[2] * embedding[3] * embedding[4]),
        patch_size=embedding[3],
        patch_size_t=embedding[2],
        num_attention_heads=embedding[0] // head,
        attention_head_dim=head,
        num_layers=blocks_of(shapes, "double_blocks"),
        num_single_layers=blocks_of(shapes, "single_blocks"),
        num_refiner_layers=blocks_of(shapes, "txt_in.individual_token_refiner.blocks"),
        guidance_embeds="guidance_in.in_layer.weight" in shapes,
        text_embed_dim=shapes["txt_in.input_embedder.weight"][1],
        pooled_projection_dim=shapes["vector_in.in_layer.weight"][1],
        rope_axes_dim=(head - 2 * axis, axis, axis),
    )


time, text = "time_text_embed", "context_embedder"
double, single, refiner, theirs = (
    "transformer_blocks.{}",
    "single_transformer_blocks.{}",
    "context_embedder.token_refiner.refiner_blocks.{}",
    "txt_in.individual_token_refiner.blocks.{}",
)
#: Names that HunyuanVideo and HunyuanVideo 1.5 share.
NAMES = {
    "img_in.proj": "x_embedder.proj",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "txt_in.input_embedder": f"{text}.proj_in",
    "txt_in.t_embedder.in_layer": f"{text}.time_text_embed.timestep_embedder.linear_1",
    "txt_in.t_embedder.out_layer": f"{text}.time_text_embed.timestep_embedder.linear_2",
    "txt_in.c_embedder.in_layer": f"{text}.time_text_embed.text_embedder.linear_1",
    "txt_in.c_embedder.out_layer": f"{text}.time_text_embed.text_embedder.linear_2",
    f"{theirs}.norm1": f"{refiner}.norm1",
    f"{theirs}.norm2": f"{refiner}.norm2",
    f"{theirs}.adaLN_modulation.1": f"{refiner}.norm_out.linear",
    f"{theirs}.self_attn.qkv": f"{refiner}.attn.to_q {refiner}.attn.to_k {refiner}.attn.to_v",
    f"{theirs}.self_attn.proj": f"{refiner}.attn.to_out.0",
    f"{theirs}.mlp.0": f"{refiner}.ff.net.0.proj",
    f"{theirs}.mlp.2": f"{refiner}.ff.net.2",
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
}
#: Tencent's own spelling -> ComfyUI's.
SPELLINGS = (
    ("txt_in.t_embedder.mlp.0.", "txt_in.t_embedder.in_layer."),
    ("txt_in.t_embedder.mlp.2.", "txt_in.t_embedder.out_layer."),
    ("txt_in.c_embedder.linear_1.", "txt_in.c_embedder.in_layer."),
    ("txt_in.c_embedder.linear_2.", "txt_in.c_embedder.out_layer."),
    ("_mod.linear.", "_mod.lin."),
    (".modulation.linear.", ".modulation.lin."),
    ("_attn_qkv.", "_attn.qkv."),
    ("_attn_proj.", "_attn.proj."),
    ("mlp.fc1.", "mlp.0."),
    ("mlp.fc2.", "mlp.2."),
    ("_in.mlp.0.", "_in.in_layer."),
    ("_in.mlp.2.", "_in.out_layer."),
    ("_attn_q_norm.weight", "_attn.norm.query_norm.scale"),
    ("_attn_k_norm.weight", "_attn.norm.key_norm.scale"),
    (".q_norm.weight", ".norm.query_norm.scale"),
    (".k_norm.weight", ".norm.key_norm.scale"),
    (".query_norm.weight", ".query_norm.scale"),
    (".key_norm.weight", ".key_norm.scale"),
)
LAYOUT = Layout(
    signature=(
        "img_in.proj.weight",
        "txt_in.individual_token_refiner.blocks.0.norm1.weight",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "single_blocks.0.linear1.weight",
        "vector_in.in_layer.weight",
        "final_layer.linear.weight",
    ),
    absent=("cond_type_embedding.weight",),
    config=config,
    swapped=("norm_out.linear",),
    spellings=SPELLINGS,
    names=NAMES
    | {
        "time_in.in_layer": f"{time}.timestep_embedder.linear_1",
        "time_in.out_layer": f"{time}.timestep_embedder.linear_2",
        "vector_in.in_layer": f"{time}.text_embedder.linear_1",
        "vector_in.out_layer": f"{time}.text_embedder.linear_2",
        "guidance_in.in_layer": f"{time}.guidance_embedder.linear_1",
        "guidance_in.out_layer": f"{time}.guidance_embedder.linear_2",
        "single_blocks.{}.modulation.lin": f"{single}.norm.linear",
        "single_blocks.{}.linear2": f"{single}.proj_out",
        "single_blocks.{}.linear1": f"{single}.attn.to_q {single}.attn.to_k {single}.attn.to_v "
        f"{single}.proj_mlp",
        "single_blocks.{}.norm.query_norm.scale": f"{single}.attn.norm_q.weight",
        "single_blocks.{}.norm.key_norm.scale": f"{single}.attn.norm_k.weight",
    },
)
