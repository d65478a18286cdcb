"""Chroma: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

import torch
from diffusers.models.embeddings import get_timestep_embedding

from . import flux
from .precise import keep_timestep

#: Rows of ComfyUI's modulation table, those of the released size; the last two are the final layer's in any
#: size.
MODULATIONS = 344


def adjust(transformer, config):
    """Timesteps are not rounded."""
    keep_timestep(
        transformer, transformer.time_text_embed, transformer.distilled_guidance_layer.in_proj, 1000.0
    )


def prepare(transformer, grid):
    """diffusers makes the table as long as the model needs."""
    embed = transformer.time_text_embed
    embed.mod_proj = get_timestep_embedding(
        torch.arange(MODULATIONS) * 1000,
        embed.mod_proj.shape[1],
        flip_sin_to_cos=True,
        downscale_freq_shift=0,
    ).to(embed.mod_proj.device)


def forward_args(config, grid, latent, sigma, cond):
    """Flux's arguments without pooled prompt and guidance."""
    arguments = flux.forward_args({"guidance_embeds": False}, grid, latent, sigma, {**cond, "y": None})
    return {
        name: value for name, value in arguments.items() if name not in ("pooled_projections", "guidance")
    }


def refusal(config, grid, cond):
    """diffusers fixes Chroma's guidance embedding at ComfyUI's default."""
    return (
        "guidance is not 0, which Chroma does not have in diffusers; remove FluxGuidance."
        if "guidance" in cond and cond["guidance"].any()
        else None
    )
