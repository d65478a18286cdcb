"""The model of benchmarks that are tested, and how they are asked to measure next to nothing."""

from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: Too small to measure anything.
SMALL = ["--quick", "--patience", "0", "--side", "8", "--text", "8"]


def save_model(folder: Path) -> str:
    """Save a Flux of few small blocks as a diffusers folder; return its path."""
    torch.manual_seed(0)
    FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    ).save_pretrained(folder)
    return str(folder)
