"""Krea 2 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of Krea2Transformer2DModel; RoPE axes are (4, 6, 6)/16 of the head size."""
    head, text_head = (
        shapes["blocks.0.attn.qknorm.qnorm.scale"][0],
        shapes["txtfusion.layerwise_blocks.0.attn.qknorm.qnorm.scale"][0],
    )
    axis, text = 6 * (head // 16), "txtfusion.layerwise_blocks.0"
    return dict(
        in_channels=shapes["first.weight"][1],
        num_layers=blocks_of(shapes, "blocks"),
        attention_head_dim=head,
        num_attention_heads=shapes["blocks.0.attn.wq.weight"][0] // head,
        num_key_value_heads=shapes["blocks.0.attn.wk.weight"][0] // head,
        intermediate_size=shapes["blocks.0.mlp.up.weight"][0],
        timestep_embed_dim=shapes["tmlp.0.weight"][1],
        text_hidden_dim=shapes[f"{text}.prenorm.scale"][0],
        num_text_layers=shapes["txtfusion.projector.weight"][1],
        text_num_attention_heads=shapes[f"{text}.attn.wq.weight"][0] // text_head,
        text_num_key_value_heads=shapes[f"{text}.attn.wk.weight"][0] // text_head,
        text_intermediate_size=shapes[f"{text}.mlp.up.weight"][0],
        num_layerwise_text_blocks=blocks_of(shapes, "txtfusion.layerwise_blocks"),
        num_refiner_text_blocks=blocks_of(shapes, "txtfusion.refiner_blocks"),
        axes_dims_rope=(head - 2 * axis, axis, axis),
    )


def block(theirs, ours):
    pairs = {
        "prenorm.scale": "norm1.weight",
        "postnorm.scale": "norm2.weight",
        "attn.wq": "attn.to_q",
        "attn.wk": "attn.to_k",
        "attn.wv": "attn.to_v",
        "attn.gate": "attn.to_gate",
        "attn.wo": "attn.to_out.0",
        "attn.qknorm.qnorm.scale": "attn.norm_q.weight",
        "attn.qknorm.knorm.scale": "attn.norm_k.weight",
        "mlp.gate": "ff.gate",
        "mlp.up": "ff.up",
        "mlp.down": "ff.down",
    }
    return {f"{theirs}.{{}}.{name}": f"{ours}.{{}}.{target}" for name, target in pairs.items()}


LAYOUT = Layout(
    signature=(
        "first.weight",
        "tmlp.0.weight",
        "tproj.1.weight",
        "txtfusion.projector.weight",
        "txtfusion.layerwise_blocks.0.prenorm.scale",
        "blocks.0.mod.lin",
        "last.linear.weight",
    ),
    absent=(),
    config=config,
    reshaped=("transformer_blocks.{}.scale_shift_table",),
    names=block("blocks", "transformer_blocks")
    | block("txtfusion.layerwise_blocks", "text_fusion.layerwise_blocks")
    | block("txtfusion.refiner_blocks", "text_fusion.refiner_blocks")
    | {
        "first": "img_in",
        "tmlp.0": "time_embed.linear_1",
        "tmlp.2": "time_embed.linear_2",
        "tproj.1": "time_mod_proj",
        "txtfusion.projector": "text_fusion.projector",
        "txtmlp.0.scale": "txt_in.norm.weight",
        "txtmlp.1": "txt_in.linear_1",
        "txtmlp.3": "txt_in.linear_2",
        "blocks.{}.mod.lin": "transformer_blocks.{}.scale_shift_table",
        "last.norm.scale": "final_layer.norm.weight",
        "last.linear": "final_layer.linear",
        "last.modulation.lin": "final_layer.scale_shift_table",
    },
)
