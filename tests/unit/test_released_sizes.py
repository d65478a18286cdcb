"""Configurations of released sizes, read from the shapes of a single file."""

import diffusers
import pytest
import torch

from backend.loading import parameter_sources
from backend.models import FAMILIES

WAN_14B = dict(num_attention_heads=40, ffn_dim=13824, num_layers=40, text_dim=4096)
WAN_I2V_14B = WAN_14B | dict(in_channels=36, image_dim=1280, added_kv_proj_dim=5120)
SD3_MEDIUM = dict(
    num_layers=24,
    num_attention_heads=24,
    caption_projection_dim=1536,
    joint_attention_dim=4096,
    pooled_projection_dim=2048,
)
#: Family, what tells a released size from the class's defaults.
RELEASED = [
    ("wan", dict(num_attention_heads=12, ffn_dim=8960, num_layers=30, text_dim=4096)),  # 2.1 T2V 1.3B
    ("wan", WAN_14B),  # 2.1 and 2.2 T2V 14B
    ("wan", WAN_I2V_14B),  # 2.1 I2V
    ("wan", WAN_I2V_14B | dict(pos_embed_seq_len=514)),  # FLF2V
    ("wan", WAN_14B | dict(in_channels=36)),  # 2.2 I2V A14B
    (
        "wan",
        dict(
            num_attention_heads=24,
            ffn_dim=14336,
            num_layers=30,
            text_dim=4096,
            in_channels=48,
            out_channels=48,
        ),
    ),  # 2.2 TI2V 5B
    ("sd3", SD3_MEDIUM | dict(pos_embed_max_size=192)),  # SD3 medium
    (
        "sd3",
        SD3_MEDIUM | dict(pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm"),
    ),  # 3.5 medium
    (
        "sd3",
        dict(
            num_layers=38,
            num_attention_heads=38,
            caption_projection_dim=2432,
            pos_embed_max_size=192,
            joint_attention_dim=4096,
            pooled_projection_dim=2048,
            qk_norm="rms_norm",
        ),
    ),  # 3.5 large
    ("flux", dict(in_channels=384, out_channels=64, guidance_embeds=True)),  # Fill
    ("flux", dict(in_channels=128, out_channels=64, guidance_embeds=True)),  # Canny, Depth
    ("flux", dict(in_channels=64, guidance_embeds=False)),  # schnell
    (
        "pixart",
        dict(use_additional_conditions=True, cross_attention_dim=1152, caption_channels=4096, num_layers=28),
    ),  # alpha 1024
    (
        "hunyuan-dit",
        dict(
            in_channels=4,
            patch_size=2,
            num_attention_heads=16,
            attention_head_dim=88,
            hidden_size=1408,
            num_layers=40,
            mlp_ratio=4.3637,
            cross_attention_dim=1024,
            cross_attention_dim_t5=2048,
            pooled_projection_dim=1024,
            use_style_cond_and_image_meta_size=True,
        ),
    ),  # 1.1
    ("hunyuan-video", dict(in_channels=33)),  # I2V v1
    (
        "cogvideox",
        dict(
            in_channels=32,
            num_attention_heads=48,
            num_layers=42,
            patch_size_t=2,
            ofs_embed_dim=512,
            use_rotary_positional_embeddings=True,
        ),
    ),  # 1.5 5B I2V
]


@pytest.mark.parametrize("name, config", RELEASED)
def test_released_sizes_are_read_from_shapes(name, config):
    """A single file with the shapes that a released configuration has gives that configuration back."""
    family = FAMILIES[name]
    with torch.device("meta"):
        transformer = getattr(diffusers, family.transformer)(**config)
    shapes = {key: tuple(value.shape) for key, value in transformer.state_dict().items()}
    file = {}
    for parameter, source in parameter_sources.sources(family.layout, shapes).items():
        rows = max(source.hi or shapes[parameter][0], file.get(source.key, (0,))[0])
        file[source.key] = (rows, *shapes[parameter][1:])
    found = family.layout.config(file)
    assert found == found | {
        key: pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
        for key, value in config.items()
    }
