"""PixArt-alpha and PixArt-sigma: 28 blocks, noise prediction on a discrete schedule, the prompt read through
cross-attention."""

from ..schedule import DiscreteSchedule
from .calls.pixart import forward_args, prepare
from .layouts.pixart import LAYOUT
from .plans import COMMON
from .spec import Family

SCHEDULE = DiscreteSchedule(0.0001, 0.02, "sqrt_linear")
FAMILY = Family(
    name="pixart",
    transformer="PixArtTransformer2DModel",
    prediction="eps",
    schedule=lambda config: SCHEDULE,
    block_lists=("transformer_blocks",),
    returns=("image",),
    attention=("image", "cross"),
    prompt_only=("attn2.to_k", "attn2.to_v"),
    prepare=prepare,
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    conditioning=("c_crossattn", "c_size", "c_ar"),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["caption_channels"]},
    forward_args=forward_args,
    # the model also predicts a variance, which no sampler here reads
    output=lambda output, grid: grid.padded.to_tokens(output[:, : grid.shape[0]]),
    layout=LAYOUT,
    tp_plan=COMMON,
)
