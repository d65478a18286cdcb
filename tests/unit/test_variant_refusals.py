"""What variants of families are refused for: requests, files, folders and prompts, each by name."""

import json
from contextlib import nullcontext
from dataclasses import replace

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from tiny import facts, opened_in, weights_module
from variant_parts import METHOD
from variants import request, write

from backend.config import ParallelConfig
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.models import FAMILIES
from backend.protocol import Sample
from backend.sampling.validation import RequestTarget, check_sample


@pytest.fixture(scope="module")
def opened(folder):
    """Variant -> its checkpoint, of which nobody loads the weights."""
    return opened_in(folder, write)


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("flux-kontext", METHOD["index_timestep_zero"], "Edit Model Reference Method"),
        (
            "flux-kontext",
            {"ref_latents.0": torch.zeros(1, 4, 8, 8)},
            "ref_latents.0 has shape .* VAE of this model",
        ),
        ("flux-kontext", {"ref_latents": torch.zeros(1, 16, 8, 8)}, "call them ref_latents.0"),
        ("flux-kontext", {"ref_latents.first": torch.zeros(1, 16, 8, 8)}, "call them ref_latents.0"),
        ("qwen-image21-edit", {"ref_latents.first": torch.zeros(1, 16, 8, 8)}, "call them ref_latents.0"),
        (
            "flux-kontext",
            {"ref_latents.0": torch.zeros(3, 16, 8, 8)},
            "ref_latents.0 has batch 3 but the latent has 1",
        ),
        ("flux-kontext", {"ref_latents_method": torch.tensor(9)}, "ref_latents_method is 9"),
        ("flux-fill", {"c_concat": None}, "c_concat has 0 channels, but this model takes 80"),
        ("flux-fill", {"c_concat": torch.zeros(1, 80, 8, 16)}, r"\[8, 16\], but the latent \[16, 16\]"),
        ("flux-fill", {"ref_latents.0": torch.zeros(1, 16, 8, 8)}, "use FLUX.1 Kontext"),
        ("flux-fill", {"ref_latents.0": torch.zeros(1, 4, 8, 8)}, "use FLUX.1 Kontext"),
        ("flux-fill", {"ref_latents.first": torch.zeros(1, 16, 8, 8)}, "use FLUX.1 Kontext"),
        ("flux2-edit", {"ref_latents.0": torch.zeros(1, 16, 8, 8)}, "VAE of this model"),
        ("qwen-image21-edit", METHOD["offset"], "index_timestep_zero"),
        ("qwen-image21-edit", {"image_slots": torch.tensor([[5, 3]])}, "in order"),
        ("qwen-image21-edit", {"image_slots": torch.tensor([[3, 99]])}, "12 tokens of the prompt"),
        ("qwen-image21-edit", {"image_slots": torch.tensor([3, 3])}, "a tensor .batch, places. is needed"),
        ("qwen-image21-edit", {"attention_mask": torch.zeros(1, 12)}, "padding after"),
        ("wan21-i2v", {"clip_fea": torch.zeros(1, 25, 1024)}, "CLIP Vision model of Wan"),
        ("wan22-i2v", {"c_concat": None}, "takes 20 besides"),
        (
            "wan21-fun-control",
            {"reference_latent": torch.zeros(1, 16, 8, 16)},
            "takes 16 channels of 16 x 16",
        ),
        (
            "wan21-fun-control",
            {
                "noise": torch.zeros(1, 16, 3, 15, 16),
                "c_concat": torch.zeros(1, 32, 3, 15, 16),
                "reference_latent": torch.zeros(1, 16, 15, 16),
            },
            "needs a latent of even sides, and this one is 15 x 16",
        ),
        (
            "wan21-fun-camera",
            {"camera_conditions": torch.zeros(1, 24, 2, 128, 128)},
            "24 channels of 128 x 128",
        ),
        (
            "wan21-vace-two",
            {"vace_context": torch.zeros(1, 2, 96, 3, 8, 16)},
            "96, 3, 16, 16. for a latent of",
        ),
        ("wan21-vace-two", {"vace_strength": torch.ones(1, 3)}, "control videos but"),
        ("wan21-vace-two", {"vace_context": None}, "vace_context"),
        (
            "wan22-animate",
            {"face_pixel_values": torch.zeros(1, 3, 5, 256, 256)},
            "3 channels and 512 x 512 pixels; use WanAnimateToVideo",
        ),
        ("wan22-animate", {"pose_latents": torch.zeros(1, 16, 2, 8, 16)}, "16 channels of 16 x 16"),
        ("wan22-animate", {"time_dim_concat": torch.zeros(1, 16, 1, 16, 16)}, "'time_dim_concat'"),
        ("wan21-phantom", {"time_dim_concat": torch.zeros(1, 16, 2, 16, 8)}, "16 channels of 16 x 16"),
        (
            "wan22-bernini",
            {"context_latents.1": torch.zeros(1, 8, 1, 8, 8)},
            "takes 16 channels for a latent",
        ),
        ("wan22-bernini", {"context_latents": torch.zeros(1, 16, 1, 8, 8)}, "call those in context"),
        ("wan22-ti2v", {"time_dim_concat": torch.zeros(1, 48, 1, 16, 16)}, "cannot be used together"),
        (
            "hunyuan-video-i2v",
            {"c_concat": torch.zeros(1, 16, 3, 16, 16)},
            "16 channels, but this model takes 17",
        ),
        ("hunyuan-video-i2v", {"ref_latent": torch.zeros(1, 16, 1, 16, 16)}, "'ref_latent'"),
        ("ltxv-i2v", {"denoise_mask": torch.full((1, 1, 3, 8, 8), -1.0)}, "which leaves the model no token"),
        ("ltxv-smaller-guides", {"keyframe_idxs": None, "guide_weights": None}, "no guides; connect both"),
        (
            "ltxv-smaller-guides",
            {"denoise_mask": torch.ones(1, 1, 3, 8, 8)},
            "at other tokens than the first",
        ),
        ("ltx25-smaller-guides", {"denoise_mask": torch.full((1, 1, 3, 6, 4), -1.0)}, "has the size"),
        ("ltxv-i2v", {"keyframe_idxs": torch.zeros(1, 3, 1000, 2)}, "1000 tokens, but the latent 192"),
        (
            "ltxv-i2v",
            {"keyframe_idxs": torch.zeros(1, 3, 60, 2)},
            "60 tokens, .* 64 a frame: .* LTXVCropGuides",
        ),
        ("ltxv-i2v", {"denoise_mask": None}, "no noise mask says .* LTXVCropGuides"),
        ("ltxv-i2v", {"denoise_mask": torch.ones(1, 1, 3, 4, 8)}, "denoise_mask has the size"),
        ("ltxv-i2v", {"guide_weights": torch.ones(1, 63)}, "63 numbers, .* of the 64 tokens"),
        ("ltxv-i2v", {"guide_weights": torch.full((1, 64), -1.0)}, "of at least 0"),
        ("ltx25-i2v", {"keyframe_idxs": None}, "of the 0 tokens of keyframe_idxs"),
        ("ltx25-i2v", {"keyframe_idxs": torch.zeros(1, 3, 24, 2)}, "24 tokens, .* 30 a frame"),
        ("ltx25-i2v", {"generated_keyframes": torch.tensor([[1, 1, 24]])}, "24 tokens a frame, .* latent 30"),
        (
            "minimax-h3-guides",
            {"given_audio": None},
            "40 and 0 tokens, but given_tags has 40 of video .0. and 6 of audio",
        ),
        ("minimax-h3-guides", {"given_positions": None}, "come together; send both"),
        (
            "minimax-h3-guides",
            {"text_tags": torch.ones(1, 5)},
            "text_tags has 5 tokens but c_crossattn has 12",
        ),
        ("minimax-h3-guides", {"text_tags": torch.full((1, 12), 7)}, "text_tags are of 0 .an image's token"),
        (
            "minimax-h3-guides",
            {"given_video": torch.zeros(1, 40, 24)},
            "given_video has width 24, but a token of this model has 96",
        ),
        ("ltx2-i2v", {"denoise_mask": torch.full((1, 1, 3, 6, 5), -1.0)}, "which leaves the model no token"),
        ("ltx2-i2v", {"audio_denoise_mask": torch.ones(1, 1, 8, 16)}, "audio_denoise_mask has the size"),
        ("ltx25-i2v", {"c_crossattn": torch.zeros(1, 12, 64)}, "takes 384; encode"),
        ("ltx25-i2v", {"attention_mask": torch.ones(1, 12)}, "yet to finish"),
        ("wan22-ti2v", {"denoise_mask": torch.ones(1, 1, 3, 4, 8)}, "denoise_mask has the size"),
        (
            "hunyuan-video15-i2v",
            {"clip_fea": torch.zeros(1, 25, 1280)},
            "clip_fea has width 1280 but this model wants 1152",
        ),
        (
            "hunyuan-video15-i2v",
            {"txt_byt5": torch.zeros(1, 25, 1280)},
            "txt_byt5 has width 1280 but this model wants 1472",
        ),
        ("hunyuan-video15-i2v", {"c_concat": torch.zeros(1, 16, 3, 10, 10)}, "c_concat has 16 channels"),
        ("hunyuan-video-i2v", {"y": torch.zeros(1, 512)}, "y has width 512, but this model reads 768"),
        ("cogvideox-1.0-i2v", {"noise": torch.zeros(1, 16, 2, 60, 90)}, "2 x 30 x 45 tokens, .* 1350 pos"),
        (
            "cogvideox-i2v",
            {"c_crossattn": torch.zeros(1, 12, 64, 1)},
            "a floating-point tensor .batch, tokens, width. is needed",
        ),
    ],
)
def test_refusals_name_the_remedy(name, change, words, opened):
    checkpoint = opened(name)
    sample = request(name)
    noise = {key: value for key, value in change.items() if key == "noise"}
    prompts = {f"positive.{key}": value for key, value in change.items() if key != "noise"}
    tensors = {**sample.tensors, **prompts, **noise, **({"latent": noise["noise"]} if noise else {})}
    sample = replace(sample, tensors={key: value for key, value in tensors.items() if value is not None})
    with pytest.raises(UnsupportedError, match=words):
        check_sample(
            sample,
            ParallelConfig(),
            RequestTarget(checkpoint, torch.float32, "cpu"),
        )


@pytest.mark.parametrize(
    "family, key, name",
    [
        ("chroma", "img_in_patch.weight", "Chroma Radiance"),
        ("wan21-t2v", "casual_audio_encoder.encoder.final_linear.weight", "Wan 2.2 S2V"),
        ("z-image-turbo", "siglip_embedder.0.weight", "Z-Image Omni"),
    ],
)
def test_files_of_other_variants_are_refused_by_name(family, key, name, tmp_path):
    state = weights_module().state_dict(facts(family)["shapes"])
    save_file(
        {f"model.diffusion_model.{k}": v for k, v in (state | {key: torch.zeros(4)}).items()},
        tmp_path / "other.safetensors",
    )
    with pytest.raises(UnsupportedError, match=f"other.safetensors is .*{name}.*KSampler"):
        open_checkpoint(str(tmp_path / "other.safetensors"))


@pytest.mark.parametrize(
    "family, entry, name",
    [
        ("qwen-image", {"guidance_embeds": True}, "guidance-distilled Qwen-Image"),
        ("z-image", {"all_patch_size": [4]}, "Z-Image of other patches"),
        ("z-image", {"all_f_patch_size": [2]}, "Z-Image of other patches"),
        ("z-image", {"siglip_feat_dim": 1152}, "Z-Image Omni"),
        ("sana", {"guidance_embeds": True}, "SANA-Sprint"),
    ],
)
def test_folders_of_other_variants_are_refused_by_name(family, entry, name, tmp_path):
    """By their config.json, before their tensors are looked at; without the entry it is the tensors that are
    missing.
    """
    save_file({"x": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    for config, says in (
        (entry, f"is .*{name}.* variant of {family} that is not supported"),
        ({}, "lacks .* tensors|tensors of its file cannot fill"),
    ):
        (tmp_path / "config.json").write_text(
            json.dumps({"_class_name": FAMILIES[family].transformer, **config})
        )
        with pytest.raises(UnsupportedError, match=says):
            open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "shape, says",
    [
        ((1, 12, 64), "has 12 tokens, .* position table is for 226; pad the prompt to 226 tokens"),
        ((1, 226, 32), "c_crossattn has width 32 but this model wants 64"),
        ((1, 226, 64), None),
    ],
)
def test_prompts_that_cogvideox_2b_has_no_positions_for_are_refused(shape, says, tmp_path):
    """Positions of sines, text's among them, where later models rotate the image's: 2b comes as a folder."""
    plain = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        num_layers=2,
        text_embed_dim=64,
        time_embed_dim=64,
        sample_height=8,
        sample_width=8,
        sample_frames=9,
    )
    plain.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    tensors = {
        "noise": torch.zeros(1, 16, 3, 8, 8),
        "latent": torch.zeros(1, 16, 3, 8, 8),
        "sigmas": torch.tensor([1.0, 0.5, 0.0]),
    }
    with pytest.raises(UnsupportedError, match=says) if says else nullcontext():
        check_sample(
            Sample("m", "euler", 1.0, 0, tensors=tensors | {"positive.c_crossattn": torch.zeros(shape)}),
            ParallelConfig(),
            RequestTarget(checkpoint, torch.float32, "cpu"),
        )
