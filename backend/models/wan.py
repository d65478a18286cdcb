"""Wan 2.1 and 2.2 of Alibaba, text or image to video: 30 to 40 blocks; the prompt and the image's CLIP features are read through cross-attention."""

import torch

from ..loading.layout import Layout, blocks_of
from .plans import COMMON
from .spec import Family


#: Rows of an encoded prompt.
TEXT = 512


def forward_args(config, grid, latent, sigma, cond):
    """Image to video: the image's latent and its mask come as further channels (c_concat), its CLIP features as clip_fea."""
    latent = torch.cat([latent, cond["c_concat"]], dim=1) if "c_concat" in cond else latent
    return dict(
        hidden_states=grid.pad(latent), encoder_hidden_states=cond["c_crossattn"], encoder_hidden_states_image=cond.get("clip_fea"),
        timestep=sigma.expand(latent.shape[0]) * 1000)


def refusal(config, grid, cond):
    """2.1's image to video models tell text from image features by a text of 512 rows."""
    if config["image_dim"] is None:
        return None
    if "clip_fea" not in cond:
        return "clip_fea is missing, which this image to video model needs; connect CLIP Vision Encode to WanImageToVideo."
    rows = cond["c_crossattn"].shape[1]
    return None if rows == TEXT else f"the prompt has {rows} rows, but this image to video model takes {TEXT}; encode it with the umT5 text encoder, and shorten it."


def config(shapes):
    """Arguments of WanTransformer3DModel; heads are 128 wide."""
    embedding, image = shapes["patch_embedding.weight"], "img_emb.proj.1.weight" in shapes
    return dict(
        patch_size=embedding[2:], num_attention_heads=embedding[0] // 128, attention_head_dim=128, in_channels=embedding[1],
        out_channels=shapes["head.head.weight"][0] // (embedding[2] * embedding[3] * embedding[4]), text_dim=shapes["text_embedding.0.weight"][1],
        freq_dim=shapes["time_embedding.0.weight"][1], ffn_dim=shapes["blocks.0.ffn.0.weight"][0], num_layers=blocks_of(shapes, "blocks"),
        cross_attn_norm="blocks.0.norm3.weight" in shapes, qk_norm="rms_norm_across_heads" if "blocks.0.self_attn.norm_q.weight" in shapes else None,
        image_dim=shapes["img_emb.proj.1.weight"][1] if image else None, added_kv_proj_dim=embedding[0] if image else None,
        pos_embed_seq_len=shapes["img_emb.emb_pos"][1] if "img_emb.emb_pos" in shapes else None,
    )


block, embedder = "blocks.{}", "condition_embedder"
LAYOUT = Layout(
    signature=("patch_embedding.weight", "text_embedding.0.weight", "time_projection.1.weight", "blocks.0.self_attn.q.weight", "blocks.0.ffn.0.weight", "head.head.weight", "head.modulation"),
    # control, camera, speech and animation variants have further parts
    absent=("vace_patch_embedding.weight", "control_adapter.conv.weight", "audio_proj.audio_proj_glob_1.layer.weight", "casual_audio_encoder.weights", "pose_patch_embedding.weight", "ref_conv.weight", "face_adapter.fuser_blocks.0.k_norm.weight"),
    config=config,
    names={
        "patch_embedding": "patch_embedding", "head.head": "proj_out", "head.modulation": "scale_shift_table",
        "text_embedding.0": f"{embedder}.text_embedder.linear_1", "text_embedding.2": f"{embedder}.text_embedder.linear_2",
        "time_embedding.0": f"{embedder}.time_embedder.linear_1", "time_embedding.2": f"{embedder}.time_embedder.linear_2", "time_projection.1": f"{embedder}.time_proj",
        "img_emb.proj.0": f"{embedder}.image_embedder.norm1", "img_emb.proj.1": f"{embedder}.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": f"{embedder}.image_embedder.ff.net.2", "img_emb.proj.4": f"{embedder}.image_embedder.norm2", "img_emb.emb_pos": f"{embedder}.image_embedder.pos_embed",
        f"{block}.modulation": f"{block}.scale_shift_table", f"{block}.norm3": f"{block}.norm2",
        f"{block}.ffn.0": f"{block}.ffn.net.0.proj", f"{block}.ffn.2": f"{block}.ffn.net.2",
        **{f"{block}.{theirs}.{leaf}": f"{block}.{ours}.{target}" for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
           for leaf, target in {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k",
                                "k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}.items()},
    },
)

FAMILY = Family(
    name="wan",
    transformer="WanTransformer3DModel",
    prediction="flow",
    block_lists=("blocks",),
    returns=("image",),
    per_token={"rotary_emb": ("image", 1)},
    attention=("image", "cross", "cross"),
    prompt_only=("attn2.to_k", "attn2.to_v", "attn2.add_k_proj", "attn2.add_v_proj"),
    refusal=refusal,
    patch=lambda config: tuple(config["patch_size"]),
    latent_channels=lambda config: config["out_channels"],
    conditioning=("c_crossattn", "c_concat", "clip_fea"),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["text_dim"]},
    forward_args=forward_args,
    output=lambda output, grid: grid.padded.to_tokens(output),
    layout=LAYOUT,
    tp_plan=COMMON,
)
