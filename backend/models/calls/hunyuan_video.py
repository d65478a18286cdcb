"""HunyuanVideo: the arguments of its forward and what it refuses."""

import torch

from . import references


def forward_args(config, grid, latent, sigma, cond):
    """Timesteps run to 1000, and so does the guidance's embedding; image to video has the image's latent and
    its mask as further channels (c_concat)."""
    batch, text = latent.shape[0], cond["c_crossattn"]
    mask = (
        cond["attention_mask"]
        if "attention_mask" in cond
        else torch.ones(text.shape[:2], dtype=torch.long, device=text.device)
    )
    guidance = cond["guidance"].reshape(-1).expand(batch) * 1000 if config["guidance_embeds"] else None
    if "guiding_frame_index" in cond:  # v2: the first frame is given, at this timestep
        frame = cond["guiding_frame_index"].reshape(-1).expand(batch)
        guidance = torch.stack([torch.zeros_like(frame) if guidance is None else guidance, frame], dim=1)
    return dict(
        hidden_states=grid.pad(references.with_channels(latent, cond)),
        encoder_hidden_states=text,
        encoder_attention_mask=mask,
        pooled_projections=cond["y"][:, : config["pooled_projection_dim"]],
        timestep=sigma.expand(batch) * 1000,
        guidance=guidance,
    )


def refusal(config, grid, cond):
    """What guidance-distilled and image to video models need."""
    if config["guidance_embeds"] and "guidance" not in cond:
        return "guidance is missing, which this guidance-distilled model needs; remove FluxDisableGuidance."
    if cond["y"].shape[1] < config["pooled_projection_dim"]:
        return (
            f"y has width {cond['y'].shape[1]}, but this model reads "
            f"{config['pooled_projection_dim']}; encode the prompt with HunyuanVideo's text encoders."
        )
    return references.wrong_channels(config["in_channels"], grid, cond)
