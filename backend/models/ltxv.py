"""LTX-Video of Lightricks (0.9 to 0.9.8), text or image to video: 28 or 48 blocks; one latent pixel a token, the prompt read through cross-attention."""

import json

import torch

from ..loading.layout import Layout, blocks_of
from .plans import COMMON
from .spec import Family

#: Pixels of the video per latent pixel (time, height, width), in which the rotary positions count.
PIXELS = (8, 32, 32)
HEADS = 32


def coordinates(config, grid, cond, device):
    """(1 or B, 3, tokens): the pixels' corners, and seconds in time; versions with causal positions start with a single frame. Guides, the last tokens, say theirs."""
    frame_rate = cond["frame_rate"].reshape(-1)[0] if "frame_rate" in cond else 25
    axes = [torch.arange(count, device=device, dtype=torch.float32) * pixels for count, pixels in zip(grid.counts, PIXELS)]
    if config.get("causal_temporal_positioning", False):
        axes[0] = (axes[0] + 1 - PIXELS[0]).clamp(min=0)
    corners = torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(1, 3, -1)
    if "keyframe_idxs" in cond and cond["keyframe_idxs"].shape[2]:
        guides = cond["keyframe_idxs"][..., 0].float().trunc()
        corners = torch.cat([corners[:, :, : -guides.shape[2]].expand(guides.shape[0], -1, -1), guides], dim=2)
    return torch.cat([corners[:, :1] * (1.0 / frame_rate), corners[:, 1:]], dim=1)


def forward_args(config, grid, latent, sigma, cond):
    """Tokens that a mask keeps are given at the noise level of their mask."""
    batch, mask = latent.shape[0], cond.get("attention_mask")
    timestep = sigma.expand(batch)
    if "denoise_mask" in cond:
        timestep = grid.to_tokens(cond["denoise_mask"][:, :1].float()).squeeze(2) * timestep[:, None]
    return dict(
        hidden_states=grid.to_tokens(latent), encoder_hidden_states=cond["c_crossattn"], timestep=timestep * 1000,
        encoder_attention_mask=None if mask is None or bool((mask == 1).all()) else mask, video_coords=coordinates(config, grid, cond, latent.device).expand(batch, -1, -1))


def refusal(config, grid, cond):
    """What the mask and the guides must fit."""
    mask, guides = cond.get("denoise_mask"), cond["keyframe_idxs"].shape[2] if "keyframe_idxs" in cond else 0
    if mask is not None and tuple(mask.shape[2:]) != grid.shape[1:]:
        return f"denoise_mask has the size {list(mask.shape[2:])}, but the latent {list(grid.shape[1:])}; make the mask with the latent's own node."
    if mask is not None and (mask < 0).any():
        return "the mask leaves tokens out (guides of a smaller picture, as IC-LoRA takes them), which is not supported; give the guide in the latent's size."
    if guides > grid.tokens:
        return f"keyframe_idxs has {guides} tokens, but the latent {grid.tokens}; crop the guides before the latent is changed."
    return None


def config(shapes):
    """Arguments of LTXVideoTransformer3DModel."""
    hidden, channels = shapes["patchify_proj.weight"]
    return dict(
        in_channels=channels, out_channels=shapes["proj_out.weight"][0], num_attention_heads=HEADS, attention_head_dim=hidden // HEADS,
        cross_attention_dim=shapes["transformer_blocks.0.attn2.to_k.weight"][1], num_layers=blocks_of(shapes, "transformer_blocks"), caption_channels=shapes["caption_projection.linear_1.weight"][1])


def metadata(strings):
    """Lightricks' own configuration tells of causal positions (since 0.9.5), which no shape shows."""
    told = json.loads(strings.get("config", "{}")).get("transformer", {})
    return {"causal_temporal_positioning": bool(told.get("causal_temporal_positioning", False))}


block = "transformer_blocks.{}"
LAYOUT = Layout(
    signature=("patchify_proj.weight", "adaln_single.emb.timestep_embedder.linear_1.weight", "caption_projection.linear_1.weight", "scale_shift_table", "transformer_blocks.0.attn1.q_norm.weight", "proj_out.weight"),
    absent=("audio_adaln_single.linear.weight", "prompt_adaln_single.linear.weight", "transformer_blocks.0.attn1.to_gate_logits.weight"),
    config=config,
    metadata=metadata,
    names={
        "patchify_proj": "proj_in", "adaln_single.linear": "time_embed.linear",
        "adaln_single.emb.timestep_embedder.linear_1": "time_embed.emb.timestep_embedder.linear_1", "adaln_single.emb.timestep_embedder.linear_2": "time_embed.emb.timestep_embedder.linear_2",
        f"{block}.attn1.q_norm": f"{block}.attn1.norm_q", f"{block}.attn1.k_norm": f"{block}.attn1.norm_k",
        f"{block}.attn2.q_norm": f"{block}.attn2.norm_q", f"{block}.attn2.k_norm": f"{block}.attn2.norm_k",
    },
)

FAMILY = Family(
    name="ltxv",
    transformer="LTXVideoTransformer3DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    returns=("image",),
    per_token={"image_rotary_emb": ("image", 1), "temb": ("image", 1)},
    attention=("image", "cross"),
    prompt_only=("attn2.to_k", "attn2.to_v"),
    clean_inpaint=True,
    patch=lambda config: (1, 1, 1),
    latent_channels=lambda config: config["in_channels"],
    conditioning=("c_crossattn", "attention_mask", "frame_rate", "denoise_mask", "keyframe_idxs"),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["caption_channels"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output,
    layout=LAYOUT,
    tp_plan=COMMON,
    per_feature=("image_rotary_emb",),
)
