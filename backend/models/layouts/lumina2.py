"""Lumina 2 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of Lumina2Transformer2DModel; RoPE has three equal axes."""
    dim, head = shapes["layers.0.attention_norm1.weight"][0], shapes["layers.0.attention.q_norm.weight"][0]
    axis, heads = head // 3 // 2 * 2, dim // head
    return dict(
        patch_size=2,
        in_channels=shapes["x_embedder.weight"][1] // 4,
        hidden_size=dim,
        num_layers=blocks_of(shapes, "layers"),
        num_refiner_layers=blocks_of(shapes, "noise_refiner"),
        num_attention_heads=heads,
        num_kv_heads=(shapes["layers.0.attention.qkv.weight"][0] // head - heads) // 2,
        axes_dim_rope=(head - 2 * axis, axis, axis),
        cap_feat_dim=shapes["cap_embedder.0.weight"][0],
    )


def block(name, modulated=True):
    own = (
        {
            f"{name}.{{}}.attention_norm1": f"{name}.{{}}.norm1.norm",
            f"{name}.{{}}.adaLN_modulation.1": f"{name}.{{}}.norm1.linear",
        }
        if modulated
        else {f"{name}.{{}}.attention_norm1": f"{name}.{{}}.norm1"}
    )
    return own | {
        f"{name}.{{}}.attention.qkv": " ".join(f"{name}.{{}}.attn.to_{part}" for part in "qkv"),
        f"{name}.{{}}.attention.out": f"{name}.{{}}.attn.to_out.0",
        f"{name}.{{}}.attention.q_norm": f"{name}.{{}}.attn.norm_q",
        f"{name}.{{}}.attention.k_norm": f"{name}.{{}}.attn.norm_k",
        f"{name}.{{}}.attention_norm2": f"{name}.{{}}.norm2",
        **{f"{name}.{{}}.feed_forward.w{i}": f"{name}.{{}}.feed_forward.linear_{i}" for i in (1, 2, 3)},
    }


LAYOUT = Layout(
    signature=(
        "x_embedder.weight",
        "cap_embedder.1.weight",
        "noise_refiner.0.attention.qkv.weight",
        "layers.0.attention.qkv.weight",
        "layers.0.adaLN_modulation.1.weight",
        "final_layer.adaLN_modulation.1.weight",
    ),
    absent=("x_pad_token", "clip_text_pooled_proj.0.weight"),
    config=config,
    names=block("noise_refiner")
    | block("context_refiner", False)
    | block("layers")
    | {
        "t_embedder.mlp.0": "time_caption_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_caption_embed.timestep_embedder.linear_2",
        "cap_embedder.0": "time_caption_embed.caption_embedder.0",
        "cap_embedder.1": "time_caption_embed.caption_embedder.1",
        "final_layer.linear": "norm_out.linear_2",
        "final_layer.adaLN_modulation.1": "norm_out.linear_1",
    },
)
