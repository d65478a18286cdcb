"""LTX-2, 2.3 and 2.5 of Lightricks: 48 blocks over video and audio, two streams of different width that
attend to themselves, to the prompt and to each other.

The prompt is Gemma's, after a projection in the text encoder's file; the connectors that finish it are in
this one, as in ComfyUI.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from . import ltxv
from .blocks import APART, Blocks
from .common import guide_weights
from .common.header_config import multiplier, transformer_config
from .common.ltx2_blocks import (
    LATENT_LAYERS,
    LATENTS,
    MASKS,
    PER_TOKEN,
    Attention,
    LTX2Block,
    VideoAndAudio,
    audio_corners,
    gate_by_highest_level,
    highest,
    join_outputs,
    noise_levels,
    share_levels,
)
from .common.ltx2_connectors import COMPANION, CONNECTOR_NAMES, MIN_TOKENS, connector, put_connectors
from .common.request_arguments import once
from .common.tensor_plans import COMMON
from .config_values import entries
from .family import Build, Cache, Conditioning, Family, ModelIO, Noise
from .key_layout import Layout, blocks_of
from .ltxv import HEADS, LATENT, corners, guides, times, tokens_of_frame

#: The attention modules of a block.
ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")


def patch_module(transformer, config):
    """Patch the transformer: ComfyUI's order of attention and its gates, modulation of each noise level once,
    weighed guides, one output, and the connectors."""
    join_outputs(transformer)
    gate_by_highest_level(transformer, config)
    video = (transformer.time_embed, transformer.av_cross_attn_video_scale_shift)
    audio = (transformer.audio_time_embed, transformer.av_cross_attn_audio_scale_shift)
    share_levels(transformer, {"video": video, "audio": audio})
    levels = (video[0], audio[0], video[1], audio[1])
    transformer.rope.__class__ = guide_weights.AudioVideoPositions
    transformer.rope.heads = config["num_attention_heads"]
    for block in transformer.transformer_blocks:
        block.__class__ = LTX2Block
        block.levels = levels
        block.watch()
        block.perturbed_attn = False
        for name in ATTENTIONS:
            getattr(block, name).set_processor(Attention())
    put_connectors(transformer, config)


def variant(config):
    """Return what differs for a configuration: keys and values of 2.3's prompt depend on the noise level."""
    modulated = config["cross_attn_mod"] and config.get("use_prompt_adaln_single", True)
    return {"cache.prompt_layers": ()} if modulated else {}


def widths(config):
    """Return (features of an unfinished prompt, of the video's and the audio's part of a finished one)."""
    if config["use_prompt_embeddings"]:
        return config["caption_channels"], (config["caption_channels"],) * 2
    parts = config["cross_attention_dim"], config["audio_cross_attention_dim"]
    return sum(parts), parts


def is_finished(config, cond):
    """Return whether the prompt has been through the connectors: LTX-2's width shows it; 2.3's does not
    change in them."""
    finished_width = sum(widths(config)[1])
    is_unprocessed = torch.as_tensor(cond.get("unprocessed_ltxav_embeds", False)).any()
    return not is_unprocessed and cond["c_crossattn"].shape[2] == finished_width


def single_frames(grid, cond, device):
    """Return (1, tokens, 1): 1 for tokens of a single frame of pixels, which 2.5 marks: those of the first
    frame and of generated_keyframes (the first of them, how many, their tokens), not guides'."""
    frames = grid.counts[0]
    size = tokens_of_frame(grid)
    marks = torch.zeros(frames, device=device)
    marks[0] = 1.0
    marks = marks.repeat_interleave(size)
    marks[grid.cells - guides(cond) :] = 0.0
    first, count = (0, 0)
    if "generated_keyframes" in cond:
        first, count = cond["generated_keyframes"][0, :2].long().tolist()
    marks[first * size : (first + count) * size] = 1.0
    return grid.select(marks, 0).view(1, -1, 1)


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. A finished prompt is the video's and the audio's; LTX-2's that is
    not is both."""
    video, audio = grid.divide(tokens)
    text = cond["c_crossattn"]
    mask = cond.get("attention_mask")
    batch = tokens.shape[0]
    parts = widths(config)[1]
    prompts = text.split(parts, dim=2) if text.shape[2] == sum(parts) else [text] * 2
    if not once(cond, "finished", is_finished, config, cond):
        prompts = [F.pad(prompt, (0, 1)) for prompt in prompts]
    factor = config["timestep_scale_multiplier"]
    levels = [times(part, cond.get(name), sigma, batch) * factor for part, name in zip(grid.grids, MASKS)]

    def sides():
        both = [corners(grid.grids[0], cond, tokens.device, True, side) for side in (0, 1)]
        return torch.stack(both, dim=3)

    moments = partial(audio_corners, config, grid.grids[1].counts[1], tokens.device)
    marks = {}
    if config.get("use_keyframes_abs_pos_embedding"):
        frames = once(cond, "marks", single_frames, grid.grids[0], cond, tokens.device)
        marks["video_keyframes_mask"] = frames
    return dict(
        hidden_states=video,
        audio_hidden_states=audio,
        encoder_hidden_states=prompts[0],
        audio_encoder_hidden_states=prompts[1],
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        timestep=levels[0],
        audio_timestep=levels[1],
        sigma=highest(levels[0], batch),
        audio_sigma=highest(levels[1], batch),
        noise_levels=noise_levels(grid, cond, sigma, batch, factor),
        video_coords=once(cond, "corners", sides).expand(batch, -1, -1, -1),
        audio_coords=once(cond, "audio corners", moments).expand(batch, -1, -1, -1),
        **marks,
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. The prompt, masks and guides are checked."""
    width, (unfinished, parts) = cond["c_crossattn"].shape[2], widths(config)
    if width not in (unfinished, sum(parts)):
        known = " or ".join(map(str, sorted({unfinished, sum(parts)})))
        return (
            f"c_crossattn has width {width}, but this LTX-2 model takes {known}; encode the prompt "
            f"with the text encoder of the same version."
        )
    finished = is_finished(config, cond)
    if not finished and not config.get("connectors"):
        return (
            f"the prompt has not been through the connectors (width {width}), and this model is the "
            f"transformer alone, which has none; choose a file with everything or the diffusers pipeline's "
            f"folder, or give LTX-2's text encoder its connectors as the second file of DualCLIPLoader."
        )
    if not finished and "attention_mask" in cond:
        return (
            "attention_mask is set for a prompt that the connectors have yet to finish, which lets them have "
            "all tokens; encode it with LTX-2's text encoder, which sends none."
        )
    return _wrong_keyframes(config, grid.grids[0], cond) or ltxv.refusal(config, grid.grids[0], cond)


def _wrong_keyframes(config, grid, cond):
    """Return why generated_keyframes cannot be marked, or None. Before 2.5 nothing reads them."""
    if "generated_keyframes" not in cond or not config.get("use_keyframes_abs_pos_embedding"):
        return None
    if cond["generated_keyframes"][0].numel() < 3:  # the check of shapes, which follows, refuses it
        return None
    frame = tokens_of_frame(grid)
    tokens = int(cond["generated_keyframes"][0, 2])
    if frame == tokens:
        return None
    return (
        f"generated_keyframes have {tokens} tokens a frame, but the latent {frame}: they were made at "
        f"another size; separate them before what changes the latent's size."
    )


#: Width of the released models, which all have a cross-modal multiplier of 1000, as diffusers' default.
#: ComfyUI's default is 1, which smaller ones have where no header says otherwise.
RELEASED_WIDTH = 4096


def config_from_shapes(shapes):
    """Return the arguments of LTX2VideoTransformer3DModel. What no shape tells is as in released files. Files
    of the transformer alone have no connectors."""
    hidden, channels = shapes["patchify_proj.weight"]
    audio, audio_channels = shapes["audio_patchify_proj.weight"]
    gated = "transformer_blocks.0.attn1.to_gate_logits.weight" in shapes
    modulated = shapes["transformer_blocks.0.scale_shift_table"][0] == 9
    caption = shapes.get("caption_projection.linear_1.weight")
    names = [f"{kind}_embeddings_connector" for kind in ("video", "audio")]
    has_connectors = all(f"{name}.learnable_registers" in shapes for name in names)
    return dict(
        in_channels=channels,
        out_channels=shapes["proj_out.weight"][0],
        num_attention_heads=HEADS,
        attention_head_dim=hidden // HEADS,
        cross_attention_dim=shapes["transformer_blocks.0.attn2.to_k.weight"][1],
        audio_in_channels=audio_channels,
        audio_out_channels=shapes["audio_proj_out.weight"][0],
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=audio // HEADS,
        audio_cross_attention_dim=shapes["transformer_blocks.0.audio_attn2.to_k.weight"][1],
        num_layers=blocks_of(shapes, "transformer_blocks"),
        gated_attn=gated,
        audio_gated_attn=gated,
        cross_attn_mod=modulated,
        audio_cross_attn_mod=modulated,
        use_prompt_embeddings=caption is not None,
        **({"caption_channels": caption[1]} if caption else {}),
        ff_bias="transformer_blocks.0.ff.net.2.bias" in shapes,
        audio_ff_bias="transformer_blocks.0.audio_ff.net.2.bias" in shapes,
        use_prompt_adaln_single="prompt_adaln_single.linear.weight" in shapes,
        use_keyframes_abs_pos_embedding="keyframes_abs_pos_embedding" in shapes,
        rope_type="split",
        rope_double_precision=True,
        timestep_scale_multiplier=1000,
        cross_attn_timestep_scale_multiplier=1000 if hidden == RELEASED_WIDTH else 1,
        connectors=[connector(shapes, name) for name in names] if has_connectors else [],
    )


def metadata(strings):
    """Return what Lightricks' own configuration says."""
    stated = transformer_config(strings)
    precision = stated.get("frequencies_precision")
    values = {
        "rope_type": stated.get("rope_type"),
        "cross_attn_timestep_scale_multiplier": multiplier(stated, "av_ca_timestep_scale_multiplier"),
        "timestep_scale_multiplier": multiplier(stated, "timestep_scale_multiplier"),
        "rope_double_precision": None if precision is None else precision == "float64",
    }
    return {name: value for name, value in values.items() if value is not None}


BLOCK = "transformer_blocks.{}"
CROSS = "av_cross_attn"
TIMES = {
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "av_ca_video_scale_shift_adaln_single": f"{CROSS}_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": f"{CROSS}_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": f"{CROSS}_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": f"{CROSS}_audio_v2a_gate",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
}
LAYOUT = Layout(
    signature=(
        "patchify_proj.weight",
        "audio_patchify_proj.weight",
        "audio_adaln_single.linear.weight",
        "transformer_blocks.0.audio_to_video_attn.q_norm.weight",
    ),
    config=config_from_shapes,
    metadata=metadata,
    companion=COMPANION,
    names={
        "patchify_proj": "proj_in",
        "audio_patchify_proj": "audio_proj_in",
        **{
            f"{theirs}.{leaf}": f"{ours}.{leaf}"
            for theirs, ours in TIMES.items()
            for leaf in ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")
        },
        **{f"{BLOCK}.{attention}.q_norm": f"{BLOCK}.{attention}.norm_q" for attention in ATTENTIONS},
        **{f"{BLOCK}.{attention}.k_norm": f"{BLOCK}.{attention}.norm_k" for attention in ATTENTIONS},
        f"{BLOCK}.scale_shift_table_a2v_ca_video": f"{BLOCK}.video_a2v_cross_attn_scale_shift_table",
        f"{BLOCK}.scale_shift_table_a2v_ca_audio": f"{BLOCK}.audio_a2v_cross_attn_scale_shift_table",
        **CONNECTOR_NAMES,
    },
)
#: Keys and values of the prompt.
PROMPT_LAYERS = ("attn2.to_k", "attn2.to_v", "audio_attn2.to_k", "audio_attn2.to_v")
CACHE = Cache(
    prompt_layers=PROMPT_LAYERS,
    padded_prompt=MIN_TOKENS,
    prompt_modules=(
        "caption_projection",
        "audio_caption_projection",
        "rope",
        "audio_rope",
        "cross_attn_rope",
        "cross_attn_audio_rope",
    ),
    # layers of Levels alone, which notes each token's level at every call
    step_modules=tuple(f"{name}.{layer}" for name in TIMES.values() for layer in ("emb", "silu", "linear")),
    image_modules=("proj_in", "audio_proj_in"),
    token_modules=("proj_in", "audio_proj_in"),
    token_latents={"proj_in": "video", "audio_proj_in": "audio"},
)
FAMILY = Family(
    name="ltx2",
    transformer="LTX2VideoTransformer3DModel",
    latent=replace(LATENT, nested=LATENTS),
    noise=Noise(clean_inpaint=True),
    io=ModelIO(forward_args, takes_tokens=True),
    blocks=Blocks(
        output_layer="outputs",
        lists={"transformer_blocks": APART},
        adapter=VideoAndAudio(),
        attention=("video", "audio", "cross", "cross", ("video", "audio"), ("audio", "video")),
        text_layers=PROMPT_LAYERS,
        latent_layers=LATENT_LAYERS,
        per_token=PER_TOKEN,
        per_feature=("video_rotary_emb", "audio_rotary_emb", "ca_video_rotary_emb", "ca_audio_rotary_emb"),
    ),
    conditioning=Conditioning(
        accepted=(
            "c_crossattn",
            "attention_mask",
            "frame_rate",
            "unprocessed_ltxav_embeds",
            "denoise_mask",
            "audio_denoise_mask",
            "keyframe_idxs",
            "generated_keyframes",
            "guide_weights",
        ),
        widths=entries(),
        precise=("frame_rate", "guide_weights"),
        refusal=refusal,
    ),
    cache=CACHE,
    build=Build(patch_module=patch_module),
    tensor_plan={**COMMON, "*.to_gate_logits": "colwise"},
    layout=LAYOUT,
    variant=variant,
)
