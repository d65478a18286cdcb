"""Tiny diffusers transformers that have no family file, as folders."""

import inspect
import json
from pathlib import Path

import diffusers
import torch

from backend.loading.autodetect.fallback import family
from backend.protocol import Sample

#: Class -> configuration. The first three are recognised and cut; the linear attention of the last runs
#: whole.
CONFIGS = {
    "AuraFlowTransformer2DModel": dict(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=256,
    ),
    "CogView4Transformer2DModel": dict(
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        text_embed_dim=24,
        out_channels=4,
        time_embed_dim=16,
        condition_dim=8,
    ),
    "SkyReelsV2Transformer3DModel": dict(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=16,
        ffn_dim=32,
        num_layers=4,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ),
    "SanaVideoTransformer3DModel": dict(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=24,
        mlp_ratio=2.5,
        sample_size=8,
        patch_size=(1, 2, 2),
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ),
}
CUT = tuple(CONFIGS)[:3]


def configuration(name: str) -> dict:
    """All arguments of the class."""
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | CONFIGS[name]


def write(folder: Path, name: str, **scheduler) -> Path:
    """A pipeline's folder with random weights."""
    torch.manual_seed(0)
    transformer = getattr(diffusers, name)(**CONFIGS[name])
    for parameter in transformer.parameters():  # some classes begin with zeros
        parameter.data += 0.05 * torch.randn_like(parameter)
    transformer.save_pretrained(folder / "transformer")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Pipeline"}))
    if scheduler:
        (folder / "scheduler").mkdir()
        (folder / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    return folder


def request(name: str, **settings) -> Sample:
    """Three steps with two prompts."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 4, *([3] if "3D" in name else []), 16, 12, generator=generator)
    tensors = {
        "noise": noise,
        "latent": torch.zeros_like(noise),
        "sigmas": torch.tensor([1.0, 0.7, 0.4, 0.0]),
    }
    tensors |= {
        f"{branch}.c_crossattn": torch.randn(1, 9, 24, generator=generator)
        for branch in ("positive", "negative")
    }
    return Sample(name, "euler", 3.0, 0, tensors=tensors, **settings)


def recognised(name: str, scheduler=None):
    """A transformer's family as it is recognised without a file of its own."""
    return family(getattr(diffusers, name), configuration(name), scheduler)[0]
