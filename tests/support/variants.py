"""Variants of the golden families: the same tiny checkpoints with other shapes, and requests with what
ComfyUI's model would make of their CONDITIONING.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from families import golden
from tiny import facts, shared, weights_module

from backend.protocol import REFERENCE_METHODS, Sample


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def frames_given(channels: int, frames: int, height: int, width: int) -> torch.Tensor:
    """A denoise mask that keeps the first frame and half of the second."""
    mask = torch.ones(1, channels, frames, height, width)
    mask[:, :, 0], mask[:, :, 1, : height // 2] = 0.0, 0.0
    return mask


#: A video of three frames and its sound, of which the first moments are given, one in part.
SOUND_GIVEN = (
    torch.cat([torch.zeros(4), torch.full((1,), 0.5), torch.ones(4)])
    .view(1, 1, 9, 1)
    .expand(1, 8, 9, 16)
    .contiguous()
)
AV_GIVEN = {
    "denoise_mask": frames_given(128, 3, 6, 5),
    "audio_denoise_mask": SOUND_GIVEN,
    "keyframe_idxs": torch.arange(30 * 6).reshape(1, 3, 30, 2),
}
AV_MASK = torch.cat(
    [AV_GIVEN[name].flatten(1)[:, None] for name in ("denoise_mask", "audio_denoise_mask")], dim=2
)


#: Two pictures of 20 rows and 6 rows of sound, for a prompt with a picture in it.
GIVEN_ROWS = {
    "given_video": randn(1, 40, 96),
    "given_audio": randn(1, 6, 32),
    "given_tags": torch.tensor([[0] * 20 + [2] * 6 + [0] * 20]),
    "given_positions": 20.0 * randn(1, 46, 3).double(),
    "origin": torch.tensor(13.0),
    "text_tags": torch.tensor([[1] * 4 + [0] * 5 + [1] * 3]),
}


@dataclass(frozen=True)
class Variant:
    """shapes: keys of the checkpoint that differ from the golden family's (None: absent). unet: entries of
    ComfyUI's unet_config that differ.
    latent: shape of the noise, where it is not the golden one's. arguments: model arguments of both branches;
    negative: of the negative one alone. louder: factor of the
    last layer, for another model of the same shapes."""

    family: str
    shapes: dict = field(default_factory=dict)
    comfy_class: str = ""
    unet: dict = field(default_factory=dict)
    latent: tuple[int, ...] | None = None
    arguments: dict = field(default_factory=dict)
    negative: dict = field(default_factory=dict)
    mask: torch.Tensor | None = None
    louder: float = 1.0


REFERENCES = {"ref_latents.0": randn(1, 16, 11, 14), "ref_latents.1": randn(1, 16, 8, 20)}
WIDE_REFERENCES = {"ref_latents.0": randn(1, 128, 7, 5), "ref_latents.1": randn(1, 128, 4, 11)}
SPLICED = {"ref_latents.0": randn(1, 64, 4, 8), "ref_latents.1": randn(1, 64, 6, 6)}
VIDEO_REFERENCES = {name: value.unsqueeze(2) for name, value in REFERENCES.items()}
METHOD = {name: {"ref_latents_method": torch.tensor(i)} for i, name in enumerate(REFERENCE_METHODS)}
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
REFERENCE_PICTURE = {"ref_conv.weight": (512, 16, 2, 2), "ref_conv.bias": (512,)}
CAMERA = {
    "control_adapter.conv.weight": (512, 24 * 64, 2, 2),
    "control_adapter.conv.bias": (512,),
    **{
        f"control_adapter.residual_blocks.0.conv{i}.{leaf}": shape
        for i in (1, 2)
        for leaf, shape in (("weight", (512, 512, 3, 3)), ("bias", (512,)))
    },
}
#: Channels of the face's encoder, of which each step halves the sides of 512 x 512 pixels: ComfyUI knows no
#: others.
FACES = (32, 64, 128, 256, 512, 512, 512, 512)
ENCODER = "motion_encoder.enc.net_app.convs"
#: A fifth block: the first of every five has a face attention.
ANIMATE = {
    **{
        key.replace("blocks.3.", "blocks.4."): tuple(shape)
        for key, shape in (facts("wan21-t2v")["shapes"] | IMAGE_EMBEDDER).items()
        if key.startswith("blocks.3.")
    },
    "pose_patch_embedding.weight": (512, 16, 1, 2, 2),
    "pose_patch_embedding.bias": (512,),
    f"{ENCODER}.0.0.weight": (32, 3, 1, 1),
    f"{ENCODER}.0.1.bias": (1, 32, 1, 1),
    **{
        f"{ENCODER}.{i}.{name}": shape
        for i, (wide, wider_) in enumerate(zip(FACES, FACES[1:]), 1)
        for name, shape in (
            ("conv1.0.weight", (wide, wide, 3, 3)),
            ("conv1.1.bias", (1, wide, 1, 1)),
            ("conv2.0.kernel", (4, 4)),
            ("conv2.1.weight", (wider_, wide, 3, 3)),
            ("conv2.2.bias", (1, wider_, 1, 1)),
            ("skip.0.kernel", (4, 4)),
            ("skip.1.weight", (wider_, wide, 1, 1)),
        )
    },
    f"{ENCODER}.8.weight": (512, 512, 4, 4),
    **{f"motion_encoder.enc.fc.{i}.weight": (512 if i < 4 else 20, 512) for i in range(5)},
    **{f"motion_encoder.enc.fc.{i}.bias": (512 if i < 4 else 20,) for i in range(5)},
    "motion_encoder.dec.direction.weight": (512, 20),
    **{
        f"face_adapter.fuser_blocks.0.{name}": shape
        for name, shape in (
            ("linear1_kv.weight", (1024, 512)),
            ("linear1_kv.bias", (1024,)),
            ("linear1_q.weight", (512, 512)),
            ("linear1_q.bias", (512,)),
            ("linear2.weight", (512, 512)),
            ("linear2.bias", (512,)),
            ("q_norm.weight", (128,)),
            ("k_norm.weight", (128,)),
        )
    },
    "face_encoder.conv1_local.conv.weight": (4096, 512, 3),
    "face_encoder.conv1_local.conv.bias": (4096,),
    **{f"face_encoder.conv{i}.conv.weight": (1024, 1024, 3) for i in (2, 3)},
    **{f"face_encoder.conv{i}.conv.bias": (1024,) for i in (2, 3)},
    "face_encoder.out_proj.weight": (512, 1024),
    "face_encoder.out_proj.bias": (512,),
    "face_encoder.padding_tokens": (1, 1, 1, 512),
}
#: Distilled models' embedder of the noise level at which a step ends.
STEP_END = {
    f"time_r_in.{layer}.{leaf}": shape
    for layer, width in (("in_layer", 256), ("out_layer", 512))
    for leaf, shape in (("weight", (512, width)), ("bias", (512,)))
}
GUIDANCE = {
    f"guidance_in.{layer}.{leaf}": None for layer in ("in_layer", "out_layer") for leaf in ("weight", "bias")
}
DUAL = {
    f"joint_blocks.{i}.x_block.{name}": shape
    for i in range(2)
    for name, shape in (
        ("attn2.qkv.weight", (768, 256)),
        ("attn2.qkv.bias", (768,)),
        ("attn2.proj.weight", (256, 256)),
        ("attn2.proj.bias", (256,)),
        ("attn2.ln_q.weight", (64,)),
        ("attn2.ln_k.weight", (64,)),
        ("adaLN_modulation.1.weight", (2304, 256)),
        ("adaLN_modulation.1.bias", (2304,)),
    )
}


def wider(family: str, by: int, to: int) -> dict:
    """The shapes of a golden family whose widths are ``to`` / ``by`` of what they are."""
    return {
        key: tuple(size * to // by if size % 256 == 0 else size for size in shape)
        for key, shape in facts(family)["shapes"].items()
    }


#: PixArt-alpha's size embedders need a width that 3 divides.
ALPHA = {
    **wider("pixart-sigma", 8, 9),
    "t_embedder.mlp.0.weight": (288, 256),
    "y_embedder.y_embedding": (120, 64),
    **{
        f"{name}.mlp.{i}.{leaf}": shape
        for name in ("csize_embedder", "ar_embedder")
        for i, leaf, shape in (
            (0, "weight", (96, 256)),
            (0, "bias", (96,)),
            (2, "weight", (96, 96)),
            (2, "bias", (96,)),
        )
    },
}
#: So does ComfyUI's table of positions, which CogVideoX 1.0's learned one replaces.
LEARNED_POSITIONS = {
    **wider("cogvideox", 2, 3),
    "patch_embed.proj.weight": (384, 32, 2, 2),
    "patch_embed.pos_embedding": (1, 226 + 1350, 384),
}

VARIANTS = {
    "flux-kontext": Variant("flux-dev", arguments=REFERENCES, negative={"c_crossattn": randn(1, 7, 64)}),
    "flux-kontext-uxo": Variant("flux-dev", arguments=REFERENCES | METHOD["uxo"]),
    "flux-fill": Variant(
        "flux-dev",
        {"img_in.weight": (256, 384)},
        "FluxInpaint",
        {"in_channels": 96},
        arguments={"c_concat": randn(1, 80, 16, 16)},
    ),
    "flux-canny": Variant(
        "flux-dev",
        {"img_in.weight": (256, 128)},
        "Flux",
        {"in_channels": 32},
        arguments={"c_concat": randn(1, 16, 16, 16)},
    ),
    "flux-schnell": Variant("flux-dev", GUIDANCE, "FluxSchnell", {"guidance_embed": False}),
    "flux2-edit": Variant("flux2-dev", arguments=WIDE_REFERENCES, negative={"ref_latents.1": None}),
    "flux3-edit": Variant("flux3", arguments=WIDE_REFERENCES, negative={"ref_latents.1": None}),
    "qwen-image-edit": Variant(
        "qwen-image", arguments=VIDEO_REFERENCES, negative={"c_crossattn": randn(1, 7, 64)}
    ),
    "qwen-image-edit-2511": Variant(
        "qwen-image",
        {"__index_timestep_zero__": (0,)},
        "QwenImage",
        {"default_ref_method": "index_timestep_zero"},
        arguments=VIDEO_REFERENCES,
    ),
    "qwen-image-layered": Variant(
        "qwen-image",
        {"time_text_embed.addition_t_embedding.weight": (2, 256)},
        "QwenImage",
        {"use_additional_t_cond": True, "default_ref_method": "negative_index"},
        latent=(1, 16, 3, 12, 14),
        arguments=VIDEO_REFERENCES,
        negative={"c_crossattn": randn(1, 7, 64)},
    ),
    "qwen-image21-edit": Variant(
        "qwen-image21",
        arguments=SPLICED | {"image_slots": torch.tensor([[3, 3]])},
        negative={"c_crossattn": randn(1, 7, 64), "ref_latents.1": None, "image_slots": torch.tensor([[5]])},
    ),
    "qwen-image21-odd": Variant(
        "qwen-image21",
        latent=(1, 64, 7, 9),
        arguments={"ref_latents.0": randn(1, 64, 5, 3), "image_slots": torch.tensor([[4]])},
        negative={"c_crossattn": randn(1, 7, 64)},
    ),
    "krea2-edit": Variant("krea2", arguments=VIDEO_REFERENCES | METHOD["index"]),
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
        {"patch_embedding.weight": (512, 48, 1, 2, 2)} | IMAGE_EMBEDDER | REFERENCE_PICTURE,
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
        {"patch_embedding.weight": (512, 52, 1, 2, 2)} | REFERENCE_PICTURE,
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
        WAN_36 | IMAGE_EMBEDDER | ANIMATE,
        "WAN22_Animate",
        {"model_type": "animate", "in_dim": 36, "num_layers": 5},
        arguments={
            "c_concat": randn(1, 20, 3, 16, 16),
            "clip_fea": randn(1, 25, 1280),
            "pose_latents": randn(1, 16, 2, 16, 16),
            "face_pixel_values": randn(1, 3, 5, 512, 512),
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
    "hunyuan-video-i2v": Variant(
        "hunyuan-video",
        {"img_in.proj.weight": (512, 33, 1, 2, 2)},
        "HunyuanVideoI2V",
        {"in_channels": 33},
        arguments={"c_concat": randn(1, 17, 3, 16, 16)},
    ),
    "hunyuan-video-i2v-v2": Variant(
        "hunyuan-video",
        arguments={"guiding_frame_index": torch.zeros(1)},
        negative={"guiding_frame_index": None},
        mask=torch.ones(1, 1, 3, 1, 1).index_fill(2, torch.tensor([0]), 0.0),
    ),
    "hunyuan-video15-i2v": Variant(
        "hunyuan-video15", arguments={"c_concat": randn(1, 33, 3, 10, 10), "clip_fea": randn(1, 25, 1152)}
    ),
    "hunyuan-video15-meanflow": Variant(
        "hunyuan-video15", STEP_END, "HunyuanVideo15", {"meanflow": True, "meanflow_sum": True}
    ),
    "hunyuan-image21-distilled": Variant(
        "hunyuan-image21",
        STEP_END | {key.replace("time_r_in", "guidance_in"): shape for key, shape in STEP_END.items()},
        "HunyuanImage21",
        {"meanflow": True, "guidance_embed": True},
        arguments={"guidance": torch.full((1,), 6.0)},
    ),
    "ltxv-i2v": Variant(
        "ltxv",
        arguments={
            "denoise_mask": frames_given(128, 3, 8, 8),
            "keyframe_idxs": torch.arange(64 * 6).reshape(1, 3, 64, 2),
        },
        mask=frames_given(128, 3, 8, 8),
    ),
    "ltx2-i2v": Variant("ltx2", arguments=AV_GIVEN, mask=AV_MASK),
    "ltx25-i2v": Variant(
        "ltx23",
        {
            "keyframes_abs_pos_embedding": (1, 256),
            **{
                f"transformer_blocks.{i}.ff.net.{part}.bias": None
                for i in range(3)
                for part in ("0.proj", "2")
            },
        },
        "LTXAV",
        {"use_keyframes_abs_pos_embedding": True, "ff_bias": False},
        arguments=AV_GIVEN | {"generated_keyframes": torch.tensor([[1, 1]])},
        mask=AV_MASK,
    ),
    "minimax-h3-guides": Variant("minimax-h3", arguments=GIVEN_ROWS, negative=dict.fromkeys(GIVEN_ROWS)),
    "cogvideox-i2v": Variant(
        "cogvideox",
        {"patch_embed.proj.weight": (256, 32, 2, 2)},
        "CogVideoX_I2V",
        {"in_channels": 32},
        arguments={"c_concat": randn(1, 16, 3, 16, 16)},
    ),
    "cogvideox-1.0-i2v": Variant(
        "cogvideox",
        LEARNED_POSITIONS,
        "CogVideoX_I2V",
        {
            "num_attention_heads": 6,
            "in_channels": 32,
            "sample_frames": 1,
            "use_learned_positional_embeddings": True,
            "use_rotary_positional_embeddings": False,
        },
        arguments={"c_concat": randn(1, 16, 3, 16, 16)},
    ),
    "cogvideox-1.5-i2v": Variant(
        "cogvideox",
        {
            "patch_embed.proj.weight": (256, 256),
            "proj_out.weight": (128, 256),
            "proj_out.bias": (128,),
            "ofs_embedding_linear_1.weight": (128, 128),
            "ofs_embedding_linear_1.bias": (128,),
            "ofs_embedding_linear_2.weight": (128, 128),
            "ofs_embedding_linear_2.bias": (128,),
        },
        "CogVideoX_I2V",
        {"in_channels": 32, "patch_size_t": 2, "ofs_embed_dim": 128},
        arguments={"c_concat": randn(1, 16, 3, 16, 16), "ofs": torch.full((1,), 2.0)},
    ),
    "pixart-alpha": Variant(
        "pixart-sigma",
        ALPHA,
        "PixArtAlpha",
        {"image_model": "pixart_alpha", "hidden_size": 288, "model_max_length": 120, "micro_condition": True},
    ),
    "hunyuan-dit-1.1": Variant(
        "hunyuan-dit",
        {"extra_embedder.0.weight": (1024, 2816), "style_embedder.weight": (1, 256)},
        "HunyuanDiT1",
        {"image_model": "hydit1", "size_cond": True, "use_style_cond": True},
    ),
    "sd3.5-medium": Variant("sd3", DUAL, "SD3", {"x_block_self_attn_layers": [0, 1]}),
}


#: Entries of unet_config for which later versions of ComfyUI ask.
NEWER = {
    "flux-dev": {"txt_ids_dims": []},
    "hunyuan-video": {"use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False},
}


def described(name: str) -> dict:
    """The facts of a variant, as tiny.facts gives a golden family's."""
    variant = VARIANTS[name]
    base = facts(variant.family)
    shapes = {
        key: list(shape) for key, shape in (base["shapes"] | variant.shapes).items() if shape is not None
    }
    return {
        "comfy_class": variant.comfy_class or base["comfy_class"],
        "unet_config": NEWER.get(variant.family, {}) | base["unet_config"] | variant.unet,
        "shapes": shapes,
    }


def write(path: Path, name: str) -> Path:
    """The checkpoint of a variant as a single file in ComfyUI's key layout."""
    return shared(path, name, lambda: state(name))


def state(name: str) -> dict[str, torch.Tensor]:
    """The weights of a variant."""
    weights = weights_module().state_dict(described(name)["shapes"])
    if "head.head.weight" in weights:
        weights["head.head.weight"] *= VARIANTS[name].louder
    # a blur, which ComfyUI reads and diffusers computes
    line = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    return weights | {key: torch.outer(line, line) for key in weights if key.endswith(".kernel")}


def request(name: str, model: str = "tiny") -> Sample:
    """A request for a variant, with a negative prompt."""
    variant = VARIANTS[name]
    sample, _ = golden(f"{variant.family}__euler_simple", model)
    tensors = dict(sample.tensors)
    if variant.latent:
        tensors["noise"], tensors["latent"] = randn(*variant.latent), torch.zeros(variant.latent)
    if variant.mask is not None:
        tensors["latent"], tensors["denoise_mask"] = randn(*tensors["noise"].shape), variant.mask
    if not variant.shapes.keys().isdisjoint(GUIDANCE):
        tensors = {key: value for key, value in tensors.items() if not key.endswith(".guidance")}
    for branch in ("positive", "negative"):
        tensors |= {
            f"{branch}.{key}": value
            for key, value in (variant.arguments | (variant.negative if branch == "negative" else {})).items()
            if value is not None
        }
    return replace(sample, tensors=tensors)
