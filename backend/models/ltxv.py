"""LTX-Video of Lightricks (0.9 to 0.9.8), text or image to video: 28 or 48 blocks; one latent pixel a token,
the prompt read through cross-attention. Tokens may have noise levels of their own (token_levels.py)."""

from dataclasses import replace
from typing import Any

import torch
from diffusers.models.normalization import AdaLayerNormSingle
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock

from .blocks import APART, Blocks
from .common import guide_weights
from .common.call_state import OwnTokens
from .common.header_config import transformer_config
from .common.ltx2_blocks import Attention
from .common.request_arguments import once
from .common.token_levels import added_part, distinct, levels_of, share_levels
from .config_values import constant, entries
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO, Noise
from .key_layout import Layout, blocks_of, under

#: Pixels of the video per latent pixel (time, height, width), in which the rotary positions count.
PIXELS = (8, 32, 32)


#: Parts of a block's modulation that are scales.
SCALES = (1, 4)


class VideoEmbedder(AdaLayerNormSingle):
    """Embed a timestep of each sample (B,), or, where the call has level_of_token, of each level (levels,).

    Of levels, blocks are given the number of each token's, (B x tokens, 1), in the place of modulation;
    ``levels`` has that (share_levels).
    """

    levels: Any

    def forward(self, timestep, added_cond_kwargs=None, batch_size=None, hidden_dtype=None):
        levels = self.levels
        found: Any = super().forward(timestep, added_cond_kwargs, batch_size, hidden_dtype)
        if levels.level_of_token is None:
            return found
        modulation, levels.embedding = found
        levels.modulation = modulation.unflatten(1, (6, -1))
        return levels.level_of_token.view(-1, 1), levels.embedding[:1].expand(batch_size, -1)


class VideoBlock(LTXVideoTransformerBlock):
    """A block of LTX-Video. temb: modulation (B, 1, 6 x D), or the numbers of tokens' levels (B, tokens, 1),
    whose modulation ``levels`` has (share_levels). Compiled, it makes all parts of all its tokens at once,
    for diffusers' form."""

    levels: Any

    def forward(
        self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, encoder_attention_mask=None
    ):
        if temb.is_floating_point():
            return super().forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, encoder_attention_mask
            )
        level_of_token = temb[..., 0]
        modulation = self.levels.modulation
        if torch.compiler.is_compiling():
            of_all = modulation.flatten(1)[level_of_token]
            return super().forward(
                hidden_states, encoder_hidden_states, of_all, image_rotary_emb, encoder_attention_mask
            )

        part = added_part(self.scale_shift_table, modulation, level_of_token, SCALES)
        x = self.norm1(hidden_states) * part(1) + part(0)
        hidden_states = hidden_states + self.attn1(x, image_rotary_emb=image_rotary_emb) * part(2)
        hidden_states = hidden_states + self.attn2(
            hidden_states, encoder_hidden_states, attention_mask=encoder_attention_mask
        )
        x = self.norm2(hidden_states) * part(4) + part(3)
        return hidden_states + self.ff(x) * part(5)


def guides(cond):
    """Count the tokens of guides, which are the last ones."""
    return cond["keyframe_idxs"].shape[2] if "keyframe_idxs" in cond else 0


def tokens_of_frame(grid):
    """Count the tokens of one frame."""
    return grid.counts[1] * grid.counts[2]


def left_out(grid, cond):
    """Return (cells,): where the mask is below 0, or None without guides. Guides of a smaller image (IC-LoRA)
    are spread over the latent's frame, with such a mask in the gaps. As in ComfyUI, the first sample's mask
    counts, wherever it is below 0: that of a guide whose strength is above 1 may be, too."""
    mask = cond.get("denoise_mask")
    places = cond.get("keyframe_idxs")
    if mask is None or places is None or places.ndim != 4 or not places.shape[2]:
        return None
    if mask.ndim != 5 or not len(mask) or tuple(mask.shape[2:]) != grid.shape[1:]:
        return None  # the check of shapes, which follows, refuses it
    return (mask[0] < 0).any(dim=0).flatten()


def corners(grid, cond, device, causal, side=0):
    """Return (1 or B, 3, tokens): where tokens begin (side 0) or end (1), in seconds and pixels; ``causal``:
    the video starts with a single frame. Guides, the last tokens, bring theirs. Two axes more say how much
    they are attended to, if that differs (guide_weights.features)."""
    frame_rate = cond["frame_rate"].reshape(-1)[0] if "frame_rate" in cond else 25
    axes = [
        (torch.arange(count, device=device, dtype=torch.float32) + side) * pixels
        for count, pixels in zip(grid.counts, PIXELS)
    ]
    if causal:
        axes[0] = (axes[0] + 1 - PIXELS[0]).clamp(min=0)
    places_of_tokens = torch.cartesian_prod(*axes).T[None]
    if guides(cond):
        stated = cond["keyframe_idxs"][..., side].float().trunc()
        places_of_tokens = torch.cat(
            [places_of_tokens[:, :, : -guides(cond)].expand(stated.shape[0], -1, -1), stated], dim=2
        )
    places = [places_of_tokens[:, :1] * (1.0 / frame_rate), places_of_tokens[:, 1:]]
    if "guide_weights" in cond:
        weighed = guide_weights.features(cond["guide_weights"], places_of_tokens.shape[2])
        batch = max(weighed.shape[0], places_of_tokens.shape[0])
        places = [x.expand(batch, -1, -1) for x in (*places, weighed)]
    return grid.select(torch.cat(places, dim=1), 2)


def first_values(grid, mask):
    """Return the first value of the mask in each token (B, tokens), by which its level is multiplied."""
    return grid.to_tokens(mask.float())[..., 0]


def times(grid, mask, sigma, batch):
    """Return noise levels (B,). With a mask, which keeps some tokens, they are (B, tokens)."""
    levels = sigma.expand(batch)
    return levels if mask is None else first_values(grid, mask) * levels[:, None]


def patch_module(transformer, config):
    """Give blocks attention that weighs guides, and modulation of each noise level once."""
    transformer.rope.__class__ = guide_weights.VideoPositions
    transformer.rope.heads = config["num_attention_heads"]
    transformer.time_embed.__class__ = VideoEmbedder
    share_levels(transformer, [transformer.time_embed, *transformer.transformer_blocks])
    for block in transformer.transformer_blocks:
        block.__class__ = VideoBlock
        block.attn1.set_processor(Attention())
        block.attn1.rope_type = "interleaved"
        block.attn1.to_gate_logits = None


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. Prompts whose tokens are all seen need no mask."""
    batch = tokens.shape[0]
    mask = cond.get("attention_mask")
    causal = config.get("causal_temporal_positioning", False)
    if mask is not None and once(cond, "mask hides nothing", lambda: bool((mask == 1).all())):
        mask = None
    places = once(cond, "corners", corners, grid, cond, tokens.device, causal)
    levels = sigma.expand(batch)
    level_of_token = {}
    if "denoise_mask" in cond:
        known = once(cond, "levels", lambda: distinct(first_values(grid, cond["denoise_mask"])))
        levels, numbers = levels_of(known, sigma, batch)
        level_of_token["level_of_token"] = numbers.view(batch, -1)
    return dict(
        hidden_states=tokens,
        encoder_hidden_states=cond["c_crossattn"],
        timestep=levels * 1000,
        encoder_attention_mask=mask,
        video_coords=places.expand(batch, -1, -1),
        **level_of_token,
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None."""
    mask = cond.get("denoise_mask")
    frame = tokens_of_frame(grid)
    if guides(cond) > grid.cells or guides(cond) % frame:
        return (
            f"keyframe_idxs has {guides(cond)} tokens, but the latent {grid.cells}, {frame} a frame: the "
            f"guides were added at another size; put LTXVCropGuides before what changes the latent's size."
        )
    if reason := _wrong_gaps(grid, cond):
        return reason
    if guides(cond) and mask is None:
        return (
            "keyframe_idxs has guides, but no noise mask says that their frames are given; sample the latent "
            "that comes with them, or remove them with LTXVCropGuides."
        )
    weights = cond.get("guide_weights")
    if weights is not None and (weights.shape[-1] != guides(cond) or not (weights >= 0).all()):
        return (
            f"guide_weights has {weights.shape[-1]} numbers, but must have one of at least 0 for each of the "
            f"{guides(cond)} tokens of keyframe_idxs; add the guides again."
        )
    return None


def _wrong_gaps(grid, cond):
    """Return why the model cannot be given the grid's tokens alone, or None."""
    mask = cond.get("denoise_mask")
    if not guides(cond) and mask is not None and (mask < 0).any():
        return (
            "the mask is below 0 where guides of a smaller image (IC-LoRA) have gaps, but this prompt has no "
            "guides; connect both prompts of LTXVAddGuide, or remove guides with LTXVCropGuides."
        )
    if not grid.tokens:
        return "the mask is below 0 everywhere, which leaves the model no token; sample with another mask."
    absent = left_out(grid, cond)
    present = torch.ones(grid.cells, dtype=torch.bool) if absent is None else ~absent.cpu()
    if present.sum() != grid.tokens or not grid.select(present, 0).all():
        return (
            "its mask is below 0 at other tokens than the first prompt's; connect both prompts of the same "
            "LTXVAddGuide, and give neither a mask of its own."
        )
    return None


HEADS = 32


def config_from_shapes(shapes):
    hidden, channels = shapes["patchify_proj.weight"]
    return dict(
        in_channels=channels,
        out_channels=shapes["proj_out.weight"][0],
        num_attention_heads=HEADS,
        attention_head_dim=hidden // HEADS,
        cross_attention_dim=shapes["transformer_blocks.0.attn2.to_k.weight"][1],
        num_layers=blocks_of(shapes, "transformer_blocks"),
        caption_channels=shapes["caption_projection.linear_1.weight"][1],
    )


def metadata(strings):
    """Return the entry causal_temporal_positioning, which Lightricks' configuration states since 0.9.5 and no
    shape shows."""
    stated = transformer_config(strings)
    return {"causal_temporal_positioning": bool(stated.get("causal_temporal_positioning", False))}


NORMS = {"q_norm": "norm_q", "k_norm": "norm_k"}
LAYOUT = Layout(
    signature=(
        "patchify_proj.weight",
        "adaln_single.emb.timestep_embedder.linear_1.weight",
        "caption_projection.linear_1.weight",
        "scale_shift_table",
        "transformer_blocks.0.attn1.q_norm.weight",
        "proj_out.weight",
    ),
    absent=(
        "audio_adaln_single.linear.weight",
        "prompt_adaln_single.linear.weight",
        "transformer_blocks.0.attn1.to_gate_logits.weight",
    ),
    config=config_from_shapes,
    metadata=metadata,
    names={
        "patchify_proj": "proj_in",
        "adaln_single.linear": "time_embed.linear",
        "adaln_single.emb.timestep_embedder.linear_1": "time_embed.emb.timestep_embedder.linear_1",
        "adaln_single.emb.timestep_embedder.linear_2": "time_embed.emb.timestep_embedder.linear_2",
        **under("transformer_blocks.{}.attn1", "transformer_blocks.{}.attn1", NORMS),
        **under("transformer_blocks.{}.attn2", "transformer_blocks.{}.attn2", NORMS),
    },
)
#: What LTX-2's video has too.
LATENT = Latent(patch=constant(1, 1, 1), pixels=constant(*PIXELS), left_out=left_out)
FAMILY = Family(
    name="ltxv",
    transformer="LTXVideoTransformer3DModel",
    latent=replace(LATENT, frames=True),
    noise=Noise(clean_inpaint=True),
    io=ModelIO(forward_args, takes_tokens=True),
    blocks=Blocks(
        output_layer="proj_out",
        adapter=OwnTokens(),
        lists={"transformer_blocks": APART},
        per_token={"image_rotary_emb": ("image", 1), "temb": ("image", 1)},
        attention=("image", "cross"),
        per_feature=("image_rotary_emb",),
    ),
    conditioning=Conditioning(
        accepted=(
            "c_crossattn",
            "attention_mask",
            "frame_rate",
            "denoise_mask",
            "keyframe_idxs",
            "guide_weights",
        ),
        widths=entries(c_crossattn="caption_channels"),
        precise=("frame_rate", "guide_weights"),
        refusal=refusal,
    ),
    cache=Cache(
        prompt_modules=("caption_projection", "rope"),
        # layers of VideoEmbedder alone, which notes each token's level at every call
        step_modules=("time_embed.emb", "time_embed.silu", "time_embed.linear"),
        image_modules=("proj_in",),
        token_modules=("proj_in",),
        prompt_layers=("attn2.to_k", "attn2.to_v"),
    ),
    build=Build(patch_module=patch_module),
    layout=LAYOUT,
)
