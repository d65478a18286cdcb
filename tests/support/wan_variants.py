"""Variants of Wan 2.1 and 2.2; Variant says what an entry holds."""

from itertools import pairwise

import torch
from tiny import facts
from variant_parts import Variant, frames_given, randn

IMAGE_EMBEDDER = {
    "img_emb.proj.0.weight": (1280,),
    "img_emb.proj.0.bias": (1280,),
    "img_emb.proj.1.weight": (1280, 1280),
    "img_emb.proj.1.bias": (1280,),
    "img_emb.proj.3.weight": (512, 1280),
    "img_emb.proj.3.bias": (512,),
    "img_emb.proj.4.weight": (512,),
    "img_emb.proj.4.bias": (512,),
    **{
        f"blocks.{i}.cross_attn.{name}": shape
        for i in range(4)
        for name, shape in (
            ("k_img.weight", (512, 512)),
            ("k_img.bias", (512,)),
            ("v_img.weight", (512, 512)),
            ("v_img.bias", (512,)),
            ("norm_k_img.weight", (512,)),
        )
    },
}
WAN_36 = {"patch_embedding.weight": (512, 36, 1, 2, 2)}
REFERENCE_IMAGE = {"ref_conv.weight": (512, 16, 2, 2), "ref_conv.bias": (512,)}
CAMERA = {
    "control_adapter.conv.weight": (512, 24 * 64, 2, 2),
    "control_adapter.conv.bias": (512,),
    **{
        f"control_adapter.residual_blocks.0.conv{i}.{leaf}": shape
        for i in (1, 2)
        for leaf, shape in (("weight", (512, 512, 3, 3)), ("bias", (512,)))
    },
}
ENCODER = "motion_encoder.enc.net_app.convs"


def animate(widths: tuple[int, ...], style: int, hidden: int) -> dict:
    """Wan Animate's further shapes. widths: channels of the face's encoder, whose blocks halve the sides of
    its images; hidden: of the encoder over time. The first of every five blocks has a face attention."""
    wan = facts("wan21-t2v")["shapes"] | IMAGE_EMBEDDER
    fifth = {
        key.replace("blocks.3.", "blocks.4."): tuple(shape)
        for key, shape in wan.items()
        if key.startswith("blocks.3.")
    }
    halving = {
        f"{ENCODER}.{i}.{name}": shape
        for i, (before, after) in enumerate(pairwise(widths), 1)
        for name, shape in (
            ("conv1.0.weight", (before, before, 3, 3)),
            ("conv1.1.bias", (1, before, 1, 1)),
            ("conv2.0.kernel", (4, 4)),
            ("conv2.1.weight", (after, before, 3, 3)),
            ("conv2.2.bias", (1, after, 1, 1)),
            ("skip.0.kernel", (4, 4)),
            ("skip.1.weight", (after, before, 1, 1)),
        )
    }
    layers = {
        "pose_patch_embedding": (512, 16, 1, 2, 2),
        **{f"motion_encoder.enc.fc.{i}": (style if i < 4 else 20, style) for i in range(5)},
        **{f"face_adapter.fuser_blocks.0.linear{name}": (512, 512) for name in ("1_q", "2")},
        "face_adapter.fuser_blocks.0.linear1_kv": (1024, 512),
        "face_encoder.conv1_local.conv": (4 * hidden, style, 3),
        **{f"face_encoder.conv{i}.conv": (hidden, hidden, 3) for i in (2, 3)},
        "face_encoder.out_proj": (512, hidden),
    }
    return {
        **fifth,
        **halving,
        **{f"{name}.weight": shape for name, shape in layers.items()},
        **{f"{name}.bias": shape[:1] for name, shape in layers.items()},
        f"{ENCODER}.0.0.weight": (widths[0], 3, 1, 1),
        f"{ENCODER}.0.1.bias": (1, widths[0], 1, 1),
        f"{ENCODER}.{len(widths)}.weight": (style, widths[-1], 4, 4),
        "motion_encoder.dec.direction.weight": (style, 20),
        **{f"face_adapter.fuser_blocks.0.{name}.weight": (128,) for name in ("q_norm", "k_norm")},
        "face_encoder.padding_tokens": (1, 1, 1, 512),
    }


WAN_VARIANTS = {
    "wan21-i2v": Variant(
        "wan21-t2v",
        WAN_36 | IMAGE_EMBEDDER,
        "WAN21_I2V",
        {"model_type": "i2v", "in_dim": 36},
        arguments={"c_concat": randn(1, 20, 3, 16, 16), "clip_fea": randn(1, 25, 1280)},
        negative={"clip_fea": None},
    ),
    "wan21-flf2v": Variant(
        "wan21-t2v",
        WAN_36 | IMAGE_EMBEDDER | {"img_emb.emb_pos": (1, 50, 1280)},
        "WAN21_I2V",
        {"model_type": "i2v", "in_dim": 36, "flf_pos_embed_token_number": 50},
        arguments={"c_concat": randn(1, 20, 3, 16, 16), "clip_fea": randn(1, 50, 1280)},
    ),
    "wan22-i2v": Variant(
        "wan21-t2v", WAN_36, "WAN21_T2V", {"in_dim": 36}, arguments={"c_concat": randn(1, 20, 3, 16, 16)}
    ),
    "wan22-i2v-low": Variant(
        "wan21-t2v",
        WAN_36,
        "WAN21_T2V",
        {"in_dim": 36},
        arguments={"c_concat": randn(1, 20, 3, 16, 16)},
        louder=1.5,
    ),
    "wan22-ti2v": Variant(
        "wan21-t2v",
        {
            "patch_embedding.weight": (512, 48, 1, 2, 2),
            "head.head.weight": (192, 512),
            "head.head.bias": (192,),
        },
        "WAN22_T2V",
        {"in_dim": 48, "out_dim": 48},
        latent=(1, 48, 3, 16, 16),
        arguments={"denoise_mask": frames_given(48, 3, 16, 16)},
        mask=frames_given(48, 3, 16, 16),
    ),
    "wan21-fun-control": Variant(
        "wan21-t2v",
        {"patch_embedding.weight": (512, 48, 1, 2, 2)} | IMAGE_EMBEDDER | REFERENCE_IMAGE,
        "WAN21_FunControl2V",
        {"model_type": "i2v", "in_dim": 48, "in_dim_ref_conv": 16},
        arguments={
            "c_concat": randn(1, 32, 3, 16, 16),
            "clip_fea": randn(1, 25, 1280),
            "reference_latent": randn(1, 16, 16, 16),
        },
        negative={"reference_latent": None},
    ),
    "wan22-fun-control": Variant(
        "wan21-t2v",
        {"patch_embedding.weight": (512, 52, 1, 2, 2)} | REFERENCE_IMAGE,
        "WAN21_T2V",
        {"in_dim": 52, "in_dim_ref_conv": 16},
        arguments={"c_concat": randn(1, 36, 3, 16, 16), "reference_latent": randn(1, 16, 16, 16)},
    ),
    "wan21-fun-camera": Variant(
        "wan21-t2v",
        {"patch_embedding.weight": (512, 32, 1, 2, 2)} | IMAGE_EMBEDDER | CAMERA,
        "WAN21_Camera",
        {"model_type": "camera", "in_dim": 32},
        arguments={
            "c_concat": randn(1, 16, 3, 16, 16),
            "clip_fea": randn(1, 25, 1280),
            "camera_conditions": randn(1, 24, 3, 128, 128),
        },
        negative={"camera_conditions": None},
    ),
    "wan22-fun-camera": Variant(
        "wan21-t2v",
        WAN_36 | CAMERA,
        "WAN22_Camera",
        {"model_type": "camera_2.2", "in_dim": 36},
        arguments={"c_concat": randn(1, 20, 3, 16, 16), "camera_conditions": randn(1, 24, 3, 128, 128)},
    ),
    "wan21-phantom": Variant(
        "wan21-t2v",
        arguments={"time_dim_concat": randn(1, 16, 2, 16, 16)},
        negative={"time_dim_concat": None},
    ),
    "wan22-bernini": Variant(
        "wan21-t2v",
        arguments={
            "context_latents.0": randn(1, 16, 3, 16, 16),
            "context_latents.1": randn(1, 16, 1, 9, 12),
        },
        negative={"context_latents.1": None},
    ),
    "wan22-animate": Variant(
        "wan21-t2v",
        # the sizes that ComfyUI knows alone, of images of 512 x 512 pixels
        WAN_36 | IMAGE_EMBEDDER | animate((32, 64, 128, 256, 512, 512, 512, 512), 512, 1024),
        "WAN22_Animate",
        {"model_type": "animate", "in_dim": 36, "num_layers": 5},
        arguments={
            "c_concat": randn(1, 20, 3, 16, 16),
            "clip_fea": randn(1, 25, 1280),
            "pose_latents": randn(1, 16, 2, 16, 16),
            "face_pixel_values": randn(1, 3, 1, 512, 512),
        },
        negative={"pose_latents": None},
    ),
    "wan22-animate-small": Variant(
        "wan21-t2v",
        WAN_36 | IMAGE_EMBEDDER | animate((8, 16, 16), 32, 64),
        "WAN22_Animate",
        {"model_type": "animate", "in_dim": 36, "num_layers": 5},
        arguments={
            "c_concat": randn(1, 20, 3, 16, 16),
            "clip_fea": randn(1, 25, 1280),
            "pose_latents": randn(1, 16, 2, 16, 16),
            "face_pixel_values": randn(1, 3, 5, 16, 16),
        },
        negative={"pose_latents": None},
    ),
    "wan21-vace-two": Variant(
        "wan21-vace",
        arguments={
            "vace_context": randn(1, 2, 96, 3, 16, 16),
            "vace_strength": torch.tensor([[0.7, 1.3]]),
        },
        negative={"vace_context": randn(1, 1, 96, 3, 16, 16), "vace_strength": torch.tensor([[0.5]])},
    ),
}
