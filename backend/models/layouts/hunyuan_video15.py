"""HunyuanVideo 1.5 in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of
from .hunyuan_video import NAMES, SPELLINGS


def config(shapes):
    """Arguments of HunyuanVideo15Transformer3DModel; RoPE axes are (16, 56, 56)/128 of the head size."""
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
        num_refiner_layers=blocks_of(shapes, "txt_in.individual_token_refiner.blocks"),
        text_embed_dim=shapes["txt_in.input_embedder.weight"][1],
        text_embed_2_dim=shapes["byt5_in.fc1.weight"][1],
        image_embed_dim=shapes["vision_in.proj.0.weight"][0],
        rope_axes_dim=(head - 2 * axis, axis, axis),
    )


LAYOUT = Layout(
    signature=(
        "img_in.proj.weight",
        "txt_in.individual_token_refiner.blocks.0.norm1.weight",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "byt5_in.fc1.weight",
        "vision_in.proj.0.weight",
        "cond_type_embedding.weight",
    ),
    absent=("vector_in.in_layer.weight",),  # HunyuanVideo
    variants={"time_r_in.in_layer.weight": "HunyuanVideo 1.5 super resolution"},
    config=config,
    swapped=("norm_out.linear",),
    spellings=SPELLINGS,
    names=NAMES
    | {
        "time_in.in_layer": "time_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_embed.timestep_embedder.linear_2",
        "cond_type_embedding.weight": "cond_type_embed.weight",
        "byt5_in.layernorm": "context_embedder_2.norm",
        **{f"byt5_in.fc{i}": f"context_embedder_2.linear_{i}" for i in (1, 2, 3)},
        "vision_in.proj.0": "image_embedder.norm_in",
        "vision_in.proj.1": "image_embedder.linear_1",
        "vision_in.proj.3": "image_embedder.linear_2",
        "vision_in.proj.4": "image_embedder.norm_out",
    },
)
