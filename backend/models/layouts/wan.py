"""Wan in single files: their keys, and the configuration that their shapes tell."""

from ...loading.layout import Layout, blocks_of


def config(shapes):
    """Arguments of WanTransformer3DModel; heads are 128 wide."""
    embedding, image = shapes["patch_embedding.weight"], "img_emb.proj.1.weight" in shapes
    return dict(
        patch_size=embedding[2:],
        num_attention_heads=embedding[0] // 128,
        attention_head_dim=128,
        in_channels=embedding[1],
        out_channels=shapes["head.head.weight"][0] // (embedding[2] * embedding[3] * embedding[4]),
        text_dim=shapes["text_embedding.0.weight"][1],
        freq_dim=shapes["time_embedding.0.weight"][1],
        ffn_dim=shapes["blocks.0.ffn.0.weight"][0],
        num_layers=blocks_of(shapes, "blocks"),
        cross_attn_norm="blocks.0.norm3.weight" in shapes,
        qk_norm="rms_norm_across_heads" if "blocks.0.self_attn.norm_q.weight" in shapes else None,
        image_dim=shapes["img_emb.proj.1.weight"][1] if image else None,
        added_kv_proj_dim=embedding[0] if image else None,
        pos_embed_seq_len=shapes["img_emb.emb_pos"][1] if "img_emb.emb_pos" in shapes else None,
    )


block, embedder = "blocks.{}", "condition_embedder"
LAYOUT = Layout(
    signature=(
        "patch_embedding.weight",
        "text_embedding.0.weight",
        "time_projection.1.weight",
        "blocks.0.self_attn.q.weight",
        "blocks.0.ffn.0.weight",
        "head.head.weight",
        "head.modulation",
    ),
    absent=(),
    variants={
        "vace_patch_embedding.weight": "Wan VACE",
        "control_adapter.conv.weight": "Wan Fun Camera",
        "ref_conv.weight": "Wan Fun Control",
        "audio_proj.audio_proj_glob_1.layer.weight": "HuMo",
        "casual_audio_encoder.encoder.final_linear.weight": "Wan 2.2 S2V",
        "face_adapter.fuser_blocks.0.k_norm.weight": "Wan 2.2 Animate",
        "pose_patch_embedding.weight": "Wan Animate",
        "patch_embedding_pose.weight": "SCAIL",
        "patch_embedding_global.weight": "WanDancer",
    },
    config=config,
    names={
        "patch_embedding": "patch_embedding",
        "head.head": "proj_out",
        "head.modulation": "scale_shift_table",
        "text_embedding.0": f"{embedder}.text_embedder.linear_1",
        "text_embedding.2": f"{embedder}.text_embedder.linear_2",
        "time_embedding.0": f"{embedder}.time_embedder.linear_1",
        "time_embedding.2": f"{embedder}.time_embedder.linear_2",
        "time_projection.1": f"{embedder}.time_proj",
        "img_emb.proj.0": f"{embedder}.image_embedder.norm1",
        "img_emb.proj.1": f"{embedder}.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": f"{embedder}.image_embedder.ff.net.2",
        "img_emb.proj.4": f"{embedder}.image_embedder.norm2",
        "img_emb.emb_pos": f"{embedder}.image_embedder.pos_embed",
        f"{block}.modulation": f"{block}.scale_shift_table",
        f"{block}.norm3": f"{block}.norm2",
        f"{block}.ffn.0": f"{block}.ffn.net.0.proj",
        f"{block}.ffn.2": f"{block}.ffn.net.2",
        **{
            f"{block}.{theirs}.{leaf}": f"{block}.{ours}.{target}"
            for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
            for leaf, target in {
                "q": "to_q",
                "k": "to_k",
                "v": "to_v",
                "o": "to_out.0",
                "norm_q": "norm_q",
                "norm_k": "norm_k",
                "k_img": "add_k_proj",
                "v_img": "add_v_proj",
                "norm_k_img": "norm_added_k",
            }.items()
        },
    },
)
