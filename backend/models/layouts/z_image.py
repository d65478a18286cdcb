"""Z-Image in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of ZImageTransformer2DModel; RoPE axes are (32, 48, 48)/128 of the head size. The model holds
    position tables of these lengths."""
    dim, head = shapes["layers.0.attention_norm1.weight"][0], shapes["layers.0.attention.q_norm.weight"][0]
    axis, queries = (
        48 * head // 128 // 2 * 2,
        shapes["layers.0.attention.qkv.weight"][0] - 2 * shapes["layers.0.attention.out.weight"][1],
    )
    return dict(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=shapes["x_embedder.weight"][1] // 4,
        dim=dim,
        n_layers=blocks_of(shapes, "layers"),
        n_refiner_layers=blocks_of(shapes, "noise_refiner"),
        n_heads=queries // head,
        n_kv_heads=queries // head,
        cap_feat_dim=shapes["cap_embedder.0.weight"][0],
        axes_dims=[head - 2 * axis, axis, axis],
        axes_lens=[4096, 1024, 1024],
        feed_forward_width=shapes["layers.0.feed_forward.w1.weight"][0],
        time_width=shapes["t_embedder.mlp.0.weight"][0],
    )


def block(name):
    return {
        f"{name}.{{}}.attention.qkv": " ".join(f"{name}.{{}}.attention.to_{part}" for part in "qkv"),
        f"{name}.{{}}.attention.out": f"{name}.{{}}.attention.to_out.0",
        f"{name}.{{}}.attention.q_norm": f"{name}.{{}}.attention.norm_q",
        f"{name}.{{}}.attention.k_norm": f"{name}.{{}}.attention.norm_k",
    }


LAYOUT = Layout(
    signature=(
        "x_embedder.weight",
        "cap_embedder.1.weight",
        "x_pad_token",
        "cap_pad_token",
        "noise_refiner.0.attention.qkv.weight",
        "layers.0.attention.qkv.weight",
        "layers.0.adaLN_modulation.0.weight",
        "final_layer.linear.weight",
    ),
    absent=(),
    variants={
        "siglip_embedder.0.weight": "Z-Image Omni",
        "clip_text_pooled_proj.0.weight": "NewBie",
        "dec_net.cond_embed.weight": "Z-Image in pixels",
    },
    config=config,
    names=block("noise_refiner")
    | block("context_refiner")
    | block("layers")
    | {
        "x_embedder": "all_x_embedder.2-1",
        "final_layer.linear": "all_final_layer.2-1.linear",
        "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    },
)
