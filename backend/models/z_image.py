"""Z-Image (turbo) of Alibaba: 30 blocks over one stream of image and text, both padded to multiples of 32
rows, behind two refiner blocks for each."""

import torch

from .calls.z_image import adjust, forward_args, refusal
from .layouts.z_image import LAYOUT
from .plans import COMMON
from .spec import Family

FAMILY = Family(
    name="z-image",
    transformer="ZImageTransformer2DModel",
    prediction="flow",
    block_lists=("layers",),
    joined=("layers",),
    image="x",
    text_position="last",  # rows that pad the image to a multiple of 32 count as text
    returns=("image",),
    shares={"adaLN_modulation.*": lambda config: 0},
    per_token={"freqs_cis": ("joint", 1)},
    heads=lambda config: config["n_heads"],
    head_size=lambda config: config["dim"] // config["n_heads"],
    adjust=adjust,
    patch=lambda config: (1, 2, 2),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    conditioning=("c_crossattn", "num_tokens", "attention_mask", "clip_text_pooled"),
    ignored=("num_tokens", "attention_mask", "clip_text_pooled"),
    required=("c_crossattn",),
    only={
        "siglip_feat_dim": (None, "Z-Image Omni"),
        "all_patch_size": ((2,), "a Z-Image of other patches"),
        "all_f_patch_size": ((1,), "a Z-Image of other patches"),
    },
    widths=lambda config: {"c_crossattn": config["cap_feat_dim"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: -grid.padded.to_tokens(torch.stack(output).squeeze(2)),
    layout=LAYOUT,
    tp_plan=COMMON,
)
