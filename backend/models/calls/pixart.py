"""PixArt: the arguments of its forward and what is changed in diffusers' modules."""

import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed


def prepare(transformer, grid):
    """ComfyUI scales the position table with the latent's size; diffusers keeps the one of the training
    size."""
    embed, (height, width) = transformer.pos_embed, grid.padded.shape[1:]
    middle = (height + width) // 2
    table = get_2d_sincos_pos_embed(
        embed.proj.out_channels,
        grid.counts[1:],
        interpolation_scale=max(round(middle / 64), 1),
        base_size=max(round(middle / 64) * 64 // embed.patch_size, 1),
        output_type="pt",
    )
    embed.pos_embed = table.float().unsqueeze(0).to(embed.pos_embed.device)
    embed.height, embed.width = grid.counts[1:]


def is_alpha(config):
    """Is the model told the picture's size? Older folders do not say, and mean the large model."""
    given = config["use_additional_conditions"]
    return config["sample_size"] == 128 if given is None else given


def forward_args(config, grid, latent, timestep, cond):
    """alpha is also told the picture's size and aspect ratio."""
    batch, (height, width) = latent.shape[0], latent.shape[2:]
    size = cond.get("c_size", torch.tensor([[height * 8.0, width * 8.0]], device=latent.device)).expand(
        batch, 2
    )
    ratio = cond.get("c_ar", torch.tensor([[height / width]], device=latent.device)).expand(batch, 1)
    extra = (
        dict(resolution=size, aspect_ratio=ratio)
        if is_alpha(config)
        else dict(resolution=None, aspect_ratio=None)
    )
    return dict(
        hidden_states=grid.pad(latent),
        encoder_hidden_states=cond["c_crossattn"],
        timestep=timestep.expand(batch),
        added_cond_kwargs=extra,
    )
