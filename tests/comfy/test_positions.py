"""Positions of PixArt and Kandinsky 5 against ComfyUI's, at the sizes of every released file."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules
from diffusers.models.embeddings import PatchEmbed

from backend.models import kandinsky5 as kandinsky5_family
from backend.models import pixart as pixart_family
from backend.models.latent_tokens import TokenGrid

with comfy_modules():
    from comfy.ldm.kandinsky5.model import Kandinsky5
    from comfy.ldm.pixart.pixartms import get_2d_sincos_pos_embed_torch
    from comfy.model_detection import detect_unet_config


@pytest.mark.parametrize("side", [64, 128, 192, 256])
@pytest.mark.parametrize("table", [None, 1024, 4096, 16384])
def test_pixarts_positions_are_comfyuis(table, side):
    """At 512 to 2048 pixels, for files with a table of positions of 512, 1024 or 2048 pixels, or none."""
    state = {"t_block.1.weight": torch.empty(0), "blocks.0.attn.qkv.weight": torch.empty(0)}
    shapes = {
        "x_embedder.proj.weight": (16, 4, 2, 2),
        "final_layer.linear.weight": (32, 16),
        "y_embedder.y_proj.fc1.weight": (16, 64),
    }
    if table is not None:
        state["pos_embed"] = torch.empty(1, table, 16, device="meta")
        shapes["pos_embed"] = (1, table, 16)
    detected = detect_unet_config(state, "").get("pe_interpolation")
    embed = PatchEmbed(height=8, width=8, patch_size=2, in_channels=4, embed_dim=16)
    transformer = SimpleNamespace(pos_embed=embed)
    pixart_family.patch_module(transformer, pixart_family.config_from_shapes(shapes))
    pixart_family.prepare(transformer, TokenGrid((4, side, side + 32), (1, 2, 2)))
    middle = side + 16
    want = get_2d_sincos_pos_embed_torch(
        16,
        h=side // 2,
        w=side // 2 + 16,
        pe_interpolation=detected or round(middle / 64),
        base_size=round(middle / 64) * 64 // 2,
    )
    torch.testing.assert_close(embed.pos_embed[0], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("width, channels", [(1792, 132), (2560, 64), (2560, 132), (4096, 132)])
def test_kandinskys_positions_are_comfyuis(width, channels):
    """Of every released width, with the channels of images and of videos."""
    sizes = {
        "visual_embeddings.in_layer.bias": (width,),
        "visual_embeddings.in_layer.weight": (width, channels),
        "time_embeddings.in_layer.bias": (512,),
        "visual_transformer_blocks.0.cross_attention.key_norm.weight": (128,),
        "visual_transformer_blocks.0.feed_forward.in_layer.weight": (64, width),
    }
    state = {name: torch.empty(shape, device="meta") for name, shape in sizes.items()}
    default = inspect.signature(Kandinsky5).parameters["rope_scale_factor"].default
    want = detect_unet_config(state, "").get("rope_scale_factor", default)
    config = {"visual_cond": channels == 132, "model_dim": width}
    assert kandinsky5_family.stretch(config, TokenGrid((16, 1, 64, 64), (1, 2, 2))) == want
