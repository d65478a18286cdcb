"""Stable Diffusion 3 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of SD3Transformer2DModel; heads are 64 wide."""
    hidden, patch = shapes["x_embedder.proj.weight"][0], shapes["x_embedder.proj.weight"][2]
    layers = blocks_of(shapes, "joint_blocks")
    return dict(
        sample_size=128,
        patch_size=patch,
        in_channels=shapes["x_embedder.proj.weight"][1],
        out_channels=shapes["final_layer.linear.weight"][0] // patch**2,
        num_layers=layers,
        attention_head_dim=64,
        num_attention_heads=hidden // 64,
        caption_projection_dim=hidden,
        joint_attention_dim=shapes["context_embedder.weight"][1],
        pooled_projection_dim=shapes["y_embedder.mlp.0.weight"][1],
        pos_embed_max_size=round(shapes["pos_embed"][1] ** 0.5),
        dual_attention_layers=tuple(
            i for i in range(layers) if f"joint_blocks.{i}.x_block.attn2.qkv.weight" in shapes
        ),
        qk_norm="rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in shapes else None,
    )


file, block = "joint_blocks.{}", "transformer_blocks.{}"
LAYOUT = Layout(
    signature=(
        "x_embedder.proj.weight",
        "pos_embed",
        "joint_blocks.0.x_block.attn.qkv.weight",
        "context_embedder.weight",
        "y_embedder.mlp.0.weight",
        "final_layer.linear.weight",
    ),
    absent=(),
    config=config,
    swapped=("norm_out.linear", "transformer_blocks.{last}.norm1_context.linear"),
    names={
        "pos_embed": "pos_embed.pos_embed",
        "x_embedder.proj": "pos_embed.proj",
        "context_embedder": "context_embedder",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        f"{file}.x_block.adaLN_modulation.1": f"{block}.norm1.linear",
        f"{file}.context_block.adaLN_modulation.1": f"{block}.norm1_context.linear",
        f"{file}.x_block.attn.qkv": f"{block}.attn.to_q {block}.attn.to_k {block}.attn.to_v",
        f"{file}.context_block.attn.qkv": f"{block}.attn.add_q_proj {block}.attn.add_k_proj "
        f"{block}.attn.add_v_proj",
        f"{file}.x_block.attn.ln_q": f"{block}.attn.norm_q",
        f"{file}.x_block.attn.ln_k": f"{block}.attn.norm_k",
        f"{file}.context_block.attn.ln_q": f"{block}.attn.norm_added_q",
        f"{file}.context_block.attn.ln_k": f"{block}.attn.norm_added_k",
        f"{file}.x_block.attn.proj": f"{block}.attn.to_out.0",
        f"{file}.context_block.attn.proj": f"{block}.attn.to_add_out",
        f"{file}.x_block.attn2.qkv": f"{block}.attn2.to_q {block}.attn2.to_k {block}.attn2.to_v",
        f"{file}.x_block.attn2.proj": f"{block}.attn2.to_out.0",
        f"{file}.x_block.attn2.ln_q": f"{block}.attn2.norm_q",
        f"{file}.x_block.attn2.ln_k": f"{block}.attn2.norm_k",
        f"{file}.x_block.mlp.fc1": f"{block}.ff.net.0.proj",
        f"{file}.x_block.mlp.fc2": f"{block}.ff.net.2",
        f"{file}.context_block.mlp.fc1": f"{block}.ff_context.net.0.proj",
        f"{file}.context_block.mlp.fc2": f"{block}.ff_context.net.2",
    },
)
