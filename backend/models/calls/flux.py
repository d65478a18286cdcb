"""Flux.1: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

import torch

from . import references
from .precise import keep_timestep


def adjust(transformer, config):
    """Timesteps are not rounded."""
    embed = transformer.time_text_embed
    keep_timestep(transformer, embed, embed.timestep_embedder.linear_1, 1000.0)


def forward_args(config, grid, latent, sigma, cond):
    """Latents travel packed 2x2, references behind; text ids are zeros, image ids (number, y, x). diffusers
    multiplies timestep and guidance by 1000 itself."""
    batch = latent.shape[0]
    how = references.method(cond, "offset")
    return dict(
        hidden_states=torch.cat(
            [grid.to_tokens(references.with_channels(latent, cond)), *references.tokens(grid, cond)], dim=1
        ),
        encoder_hidden_states=cond["c_crossattn"],
        pooled_projections=cond["y"],
        timestep=sigma.expand(batch),
        guidance=cond["guidance"].reshape(-1).expand(batch) if config["guidance_embeds"] else None,
        img_ids=references.all_positions(
            grid, cond, how if how in references.PLACES else "offset", latent.device
        ),
        txt_ids=latent.new_zeros(cond["c_crossattn"].shape[1], 3),
    )


def refusal(config, grid, cond):
    """Fill, Canny and Depth take a picture as channels; diffusers' blocks give one timestep to all rows."""
    if config["guidance_embeds"] and "guidance" not in cond:
        return "guidance is missing, which this guidance-distilled model needs; remove FluxDisableGuidance."
    if references.references(cond) and config["in_channels"] != (
        config["out_channels"] or config["in_channels"]
    ):
        return (
            "it has reference latents, but this model takes its picture as channels (Fill, Canny, "
            "Depth); use FLUX.1 Kontext or remove ReferenceLatent."
        )
    return references.wrong_references(
        grid, cond, "choose another method in Edit Model Reference Method"
    ) or references.wrong_channels(config["in_channels"] // 4, grid, cond)
