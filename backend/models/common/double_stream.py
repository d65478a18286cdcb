"""Names and sizes of double-stream blocks in single files of Flux and of the families that took over its
layout."""

from ..key_layout import Shapes, blocks_of, under

#: The file's module -> diffusers' (key_layout.Layout).
DOUBLE_STREAM = under(
    "double_blocks.{}",
    "transformer_blocks.{}",
    {
        "img_mod.lin": "norm1.linear",
        "txt_mod.lin": "norm1_context.linear",
        "img_attn.qkv": "attn.to_q attn.to_k attn.to_v",
        "txt_attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
        "img_attn.norm.query_norm.scale": "attn.norm_q.weight",
        "img_attn.norm.key_norm.scale": "attn.norm_k.weight",
        "txt_attn.norm.query_norm.scale": "attn.norm_added_q.weight",
        "txt_attn.norm.key_norm.scale": "attn.norm_added_k.weight",
        "img_attn.proj": "attn.to_out.0",
        "txt_attn.proj": "attn.to_add_out",
        "img_mlp.0": "ff.net.0.proj",
        "img_mlp.2": "ff.net.2",
        "txt_mlp.0": "ff_context.net.0.proj",
        "txt_mlp.2": "ff_context.net.2",
    },
)
#: The same of single-stream blocks.
SINGLE_STREAM = under(
    "single_blocks.{}",
    "single_transformer_blocks.{}",
    {
        "modulation.lin": "norm.linear",
        "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
        "linear2": "proj_out",
        "norm.query_norm.scale": "attn.norm_q.weight",
        "norm.key_norm.scale": "attn.norm_k.weight",
    },
)
#: What files of Tencent's later models keep apart of both.
DOUBLE_APART = under(
    "double_blocks.{}",
    "transformer_blocks.{}",
    {f"img_attn_{each}": f"attn.to_{each}" for each in "qkv"}
    | {f"txt_attn_{each}": f"attn.add_{each}_proj" for each in "qkv"},
)
SINGLE_APART = under(
    "single_blocks.{}",
    "single_transformer_blocks.{}",
    {f"linear1_{each}": f"attn.to_{each}" for each in "qkv"} | {"linear1_mlp": "proj_mlp"},
)


def config_of(shapes: Shapes) -> dict:
    """Return the arguments that the diffusers classes of this layout have in common, from a file's shapes."""
    head = shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    return dict(
        in_channels=shapes["img_in.weight"][1],
        out_channels=shapes["final_layer.linear.weight"][0],
        num_layers=blocks_of(shapes, "double_blocks"),
        num_single_layers=blocks_of(shapes, "single_blocks"),
        attention_head_dim=head,
        num_attention_heads=shapes["img_in.weight"][0] // head,
        joint_attention_dim=shapes["txt_in.weight"][1],
    )
