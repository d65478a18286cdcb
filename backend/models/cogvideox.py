"""CogVideoX (2b, 5b) and 1.5 of Zhipu, text or image to video: 30 or 42 joint blocks, v-prediction on a
discrete schedule; text first."""

from ..schedule import DiscreteSchedule
from .calls.cogvideox import forward_args, refusal
from .layouts.cogvideox import LAYOUT
from .plans import COMMON
from .spec import Family

SCHEDULE = DiscreteSchedule(0.00085, 0.012, zero_terminal_snr=True)
FAMILY = Family(
    name="cogvideox",
    transformer="CogVideoXTransformer3DModel",
    prediction="v-ddpm",
    schedule=lambda config: SCHEDULE,
    block_lists=("transformer_blocks",),
    text="encoder_hidden_states",
    text_position="first",
    returns=("image", "text"),
    modulation=("norm1.linear", "norm2.linear"),
    per_token={"image_rotary_emb": ("image", 0)},
    patch=lambda config: (config.get("patch_size_t") or 1, config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["out_channels"],
    frames=True,
    conditioning=("c_crossattn", "c_concat", "ofs"),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["text_embed_dim"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: grid.padded.to_tokens(output.transpose(1, 2)),
    layout=LAYOUT,
    tp_plan=COMMON,
)
