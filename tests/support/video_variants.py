"""Variants of other video models than Wan, and of HunyuanImage, whose distilled models are told where a step
ends, as HunyuanVideo's are; Variant says what an entry holds."""

import torch
from variant_parts import Variant, frames_given, randn, wider

#: A video of three frames and its audio, of which the first moments are given, one in part.
AUDIO_GIVEN = (
    torch.cat([torch.zeros(4), torch.full((1,), 0.5), torch.ones(4)])
    .view(1, 1, 9, 1)
    .expand(1, 8, 9, 16)
    .contiguous()
)
AV_GIVEN = {
    "denoise_mask": frames_given(128, 3, 6, 5),
    "audio_denoise_mask": AUDIO_GIVEN,
    "keyframe_idxs": torch.arange(30 * 6).reshape(1, 3, 30, 2),
}
AV_MASK = torch.cat(
    [AV_GIVEN[name].flatten(1)[:, None] for name in ("denoise_mask", "audio_denoise_mask")], dim=2
)


def with_gaps(mask: torch.Tensor) -> torch.Tensor:
    """The mask with a last frame of LTXVAddGuide's for a guide of half the size and strength 0.8."""
    gaps = mask.clone()
    gaps[:, :, -1] = -1.8
    gaps[:, :, -1, ::2, ::2] = 0.2
    return gaps


#: LTX-Video's and LTX-2's masks with such a guide, which is the last frame.
VIDEO_GAPS = with_gaps(frames_given(128, 3, 8, 8))
AV_GAPS = AV_GIVEN | {"denoise_mask": with_gaps(AV_GIVEN["denoise_mask"])}
AV_GAPS_MASK = torch.cat(
    [AV_GAPS[name].flatten(1)[:, None] for name in ("denoise_mask", "audio_denoise_mask")], dim=2
)


#: Two images of 20 tokens and 6 tokens of audio, for a prompt with an image in it.
GIVEN_ROWS = {
    "given_video": randn(1, 40, 96),
    "given_audio": randn(1, 6, 32),
    "given_tags": torch.tensor([[0] * 20 + [2] * 6 + [0] * 20]),
    "given_positions": 20.0 * randn(1, 46, 3).double(),
    "origin": torch.tensor(13.0),
    "text_tags": torch.tensor([[1] * 4 + [0] * 5 + [1] * 3]),
}


#: Distilled models' embedder of the noise level at which a step ends.
STEP_END = {
    f"time_r_in.{layer}.{leaf}": shape
    for layer, width in (("in_layer", 256), ("out_layer", 512))
    for leaf, shape in (("weight", (512, width)), ("bias", (512,)))
}
#: So does ComfyUI's table of positions, which CogVideoX 1.0's learned one replaces.
LEARNED_POSITIONS = {
    **wider("cogvideox", 2, 3),
    "patch_embed.proj.weight": (384, 32, 2, 2),
    "patch_embed.pos_embedding": (1, 226 + 1350, 384),
}
#: LTX-2.5's marks of single frames, and its MLPs without biases.
LTX25 = {
    "keyframes_abs_pos_embedding": (1, 256),
    **{f"transformer_blocks.{i}.ff.net.{part}.bias": None for i in range(3) for part in ("0.proj", "2")},
}
LTX25_CONFIG = {"use_keyframes_abs_pos_embedding": True, "ff_bias": False}
LTX25_GUIDES = {
    "generated_keyframes": torch.tensor([[1, 1, 30]]),
    "guide_weights": torch.linspace(0, 1.2, 30)[None],
}

VIDEO_VARIANTS = {
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
    "hunyuan-video15-sr": Variant(
        "hunyuan-video15",
        STEP_END | {"img_in.proj.weight": (512, 98, 1, 1, 1)},
        "HunyuanVideo15_SR_Distilled",
        {"in_channels": 98, "meanflow": True},
        arguments={"c_concat": randn(1, 66, 3, 10, 10), "clip_fea": randn(1, 25, 1152)},
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
            "guide_weights": torch.linspace(0, 1.2, 64)[None],
        },
        negative={"guide_weights": None},
        mask=frames_given(128, 3, 8, 8),
    ),
    "ltx2-i2v": Variant("ltx2", arguments=AV_GIVEN, mask=AV_MASK),
    "ltx25-i2v": Variant(
        "ltx23",
        LTX25,
        "LTXAV",
        LTX25_CONFIG,
        arguments=AV_GIVEN | LTX25_GUIDES,
        negative={"guide_weights": None},
        mask=AV_MASK,
    ),
    "ltxv-smaller-guides": Variant(
        "ltxv",
        arguments={
            "denoise_mask": VIDEO_GAPS,
            "keyframe_idxs": torch.arange(64 * 6).reshape(1, 3, 64, 2),
            "guide_weights": torch.linspace(0, 1.2, 64)[None],
        },
        negative={"guide_weights": None},
        mask=VIDEO_GAPS,
    ),
    "ltx25-smaller-guides": Variant(
        "ltx23",
        LTX25,
        "LTXAV",
        LTX25_CONFIG,
        arguments=AV_GAPS | LTX25_GUIDES,
        negative={"guide_weights": None},
        mask=AV_GAPS_MASK,
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
    "cogvideox-void": Variant(
        "cogvideox",
        {
            "patch_embed.proj.weight": (256, 384),
            "proj_out.weight": (128, 256),
            "proj_out.bias": (128,),
        },
        "CogVideoX_Inpaint",
        {"in_channels": 48, "patch_size_t": 2},
        arguments={"c_concat": randn(1, 32, 3, 16, 16)},
    ),
}
