"""Flux.3 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of Flux3Transformer2DModel; RoPE has four equal axes."""
    hidden, head = shapes["emb_in.image.weight"][0], shapes["single_blocks.0.norm.query_norm.scale"][0]
    axis = head // 4 // 2 * 2
    return dict(
        in_channels=shapes["emb_in.image.weight"][1],
        cond_in_channels=shapes["emb_in.image_cond.weight"][1],
        num_layers=blocks_of(shapes, "content_mode_blocks.image"),
        num_single_layers=blocks_of(shapes, "single_blocks"),
        attention_head_dim=head,
        num_attention_heads=shapes["single_blocks.0.q_proj.weight"][0] // head,
        joint_attention_dim=shapes["txt_in.weight"][1],
        timestep_channels=shapes["time_in.in_layer.weight"][1],
        mlp_ratio=shapes["single_blocks.0.mlp_out.weight"][1] / hidden,
        axes_dims_rope=(head - 3 * axis, axis, axis, axis),
        flow_map="ref_time_in.in_layer.weight" in shapes,
    )


def block(theirs, ours):
    pairs = {
        "q_proj": "attn.to_q",
        "k_proj": "attn.to_k",
        "v_proj": "attn.to_v",
        "attn_out": "attn.to_out.0",
        "norm.query_norm.scale": "attn.norm_q.weight",
        "norm.key_norm.scale": "attn.norm_k.weight",
        "mlp_in": "ff.linear_in",
        "mlp_out": "ff.linear_out",
    }
    return {f"{theirs}.{{}}.{name}": f"{ours}.{{}}.{target}" for name, target in pairs.items()}


LAYOUT = Layout(
    signature=(
        "emb_in.image.weight",
        "txt_in.weight",
        "early_stream_modulations.image.lin.weight",
        "content_mode_blocks.image.0.q_proj.weight",
        "txt_mode_blocks.0.q_proj.weight",
        "single_blocks.0.q_proj.weight",
    ),
    absent=(),
    config=config,
    swapped=("norm_out.linear",),
    spellings=(("query_norm.weight", "query_norm.scale"), ("key_norm.weight", "key_norm.scale")),
    names=block("content_mode_blocks.image", "mode_blocks.image")
    | block("content_mode_blocks.image_cond", "mode_blocks.image_cond")
    | block("txt_mode_blocks", "txt_mode_blocks")
    | block("single_blocks", "single_transformer_blocks")
    | {
        "emb_in.image": "x_embedders.image",
        "emb_in.image_cond": "x_embedders.image_cond",
        "txt_in": "context_embedder",
        "time_in.in_layer": "timestep_embedder.linear_1",
        "time_in.out_layer": "timestep_embedder.linear_2",
        "ref_time_in.in_layer": "target_timestep_embedder.linear_1",
        "ref_time_in.out_layer": "target_timestep_embedder.linear_2",
        **{
            f"{phase}_stream_modulations.{mode}.lin": f"{phase}_stream_modulations.{mode}.linear"
            for phase in ("early", "single")
            for mode in ("image", "image_cond", "txt")
        },
        "final_layer.image.linear": "proj_out",
        "final_layer.image.adaLN_modulation.1": "norm_out.linear",
    },
)
