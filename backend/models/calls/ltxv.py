"""LTX-Video: the arguments of its forward and what it refuses."""

import torch

#: Pixels of the video per latent pixel (time, height, width), in which the rotary positions count.
PIXELS = (8, 32, 32)


def guides(cond):
    """How many of the last tokens are guides."""
    return cond["keyframe_idxs"].shape[2] if "keyframe_idxs" in cond else 0


def corners(grid, cond, device, causal, side=0):
    """(1 or B, 3, tokens): where tokens begin (side 0) or end (1), in pixels, in time in seconds; ``causal``:
    the video starts with a single frame. Guides, the last tokens, say theirs."""
    frame_rate = cond["frame_rate"].reshape(-1)[0] if "frame_rate" in cond else 25
    axes = [
        (torch.arange(count, device=device, dtype=torch.float32) + side) * pixels
        for count, pixels in zip(grid.counts, PIXELS)
    ]
    if causal:
        axes[0] = (axes[0] + 1 - PIXELS[0]).clamp(min=0)
    found = torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(1, 3, -1)
    if guides(cond):
        told = cond["keyframe_idxs"][..., side].float().trunc()
        found = torch.cat([found[:, :, : -guides(cond)].expand(told.shape[0], -1, -1), told], dim=2)
    return torch.cat([found[:, :1] * (1.0 / frame_rate), found[:, 1:]], dim=1)


def times(grid, mask, sigma, batch):
    """Noise levels (B,), or (B, tokens) where a mask keeps some: those are given at the level of their mask,
    that of a token's first value."""
    return (
        sigma.expand(batch)
        if mask is None
        else grid.to_tokens(mask.float())[..., 0] * sigma.expand(batch)[:, None]
    )


def forward_args(config, grid, latent, sigma, cond):
    """Prompts whose rows are all seen need no mask."""
    batch, mask = latent.shape[0], cond.get("attention_mask")
    return dict(
        hidden_states=grid.to_tokens(latent),
        encoder_hidden_states=cond["c_crossattn"],
        timestep=times(grid, cond.get("denoise_mask"), sigma, batch) * 1000,
        encoder_attention_mask=None if mask is None or bool((mask == 1).all()) else mask,
        video_coords=corners(
            grid, cond, latent.device, config.get("causal_temporal_positioning", False)
        ).expand(batch, -1, -1),
    )


def refusal(config, grid, cond):
    """What the mask must hold, and the guides fit."""
    mask = cond.get("denoise_mask")
    if mask is not None and (mask < 0).any():
        return (
            "the mask leaves tokens out (guides of a smaller picture, as IC-LoRA takes them), which is "
            "not supported; give the guide in the latent's size."
        )
    if guides(cond) > grid.tokens:
        return (
            f"keyframe_idxs has {guides(cond)} tokens, but the latent {grid.tokens}; crop the guides "
            f"before the latent is changed."
        )
    return None
