"""LTX-2, 2.3 and 2.5 of Lightricks: 48 blocks over video and sound, two streams of different width that
attend to themselves, to the prompt and to each other.

The prompt is Gemma's, behind a projection in the text encoder's file; the connectors that finish it are in
this one, as in ComfyUI.
"""

from .calls.ltx2 import adjust, forward_args, refusal, variant
from .layouts.ltx2 import BESIDE, LAYOUT
from .plans import COMMON
from .spec import Family, Nested

#: Sound: channels and frequencies of a latent, one moment of which is a token.
CHANNELS, FREQUENCIES = 8, 16
FAMILY = Family(
    name="ltx2",
    transformer="LTX2VideoTransformer3DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    streams=("hidden_states", "audio_hidden_states"),
    returns=("image",),
    attention=("video", "audio", "cross", "cross", ("video", "audio"), ("audio", "video")),
    per_token={
        "video_rotary_emb": ("video", -2),
        "audio_rotary_emb": ("audio", -2),
        "ca_video_rotary_emb": ("video", -2),
        "ca_audio_rotary_emb": ("audio", -2),
        "temb": ("video", 1),
        "temb_audio": ("audio", 1),
        "temb_ca_scale_shift": ("video", 1),
        "temb_ca_audio_scale_shift": ("audio", 1),
    },
    prompt_only=("attn2.to_k", "attn2.to_v", "audio_attn2.to_k", "audio_attn2.to_v"),
    prompt_modules=("caption_projection", "audio_caption_projection"),
    variant=variant,
    adjust=adjust,
    patch=lambda config: (1, 1, 1),
    latent_channels=lambda config: config["in_channels"],
    nested=Nested(
        ("video", "audio"),
        patches=lambda config: ((1, 1, 1), (1, 1, FREQUENCIES)),
        channels=lambda config: (config["in_channels"], CHANNELS),
        order=(1, 0),
    ),
    conditioning=(
        "c_crossattn",
        "attention_mask",
        "frame_rate",
        "unprocessed_ltxav_embeds",
        "denoise_mask",
        "audio_denoise_mask",
        "keyframe_idxs",
        "generated_keyframes",
    ),
    required=("c_crossattn",),
    precise=("frame_rate",),
    widths=lambda config: {},
    clean_inpaint=True,
    refusal=refusal,
    forward_args=forward_args,
    output=lambda outputs, grid: grid.join(list(outputs)),
    tp_plan={**COMMON, "*.to_gate_logits": "colwise"},
    per_feature=("video_rotary_emb", "audio_rotary_emb", "ca_video_rotary_emb", "ca_audio_rotary_emb"),
    layout=LAYOUT,
    beside=BESIDE,
)
