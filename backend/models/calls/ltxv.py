"""LTX-Video: the arguments of its forward and what it refuses."""

import torch

#: Pixels of the video per latent pixel (time, height, width), in which the rotary positions count.
PIXELS = (8, 32, 32)


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
