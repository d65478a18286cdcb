"""Flux.2: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

import torch

from . import references
from .precise import keep_timestep

#: What ComfyUI's method "index" counts references by, on the first axis of positions.
NUMBERS = 10


def adjust(transformer, config):
    """Timesteps are not rounded."""
    embed = transformer.time_guidance_embed
    keep_timestep(transformer, embed, embed.timestep_embedder.linear_1, 1000.0)


def forward_args(config, grid, latent, sigma, cond):
    """References follow the latent. Positions are (number, y, x, 0), and (0, 0, 0, number) for text.
    diffusers multiplies timestep and guidance by 1000 itself."""
    batch, device, text, how = (
        latent.shape[0],
        latent.device,
        cond["c_crossattn"],
        references.method(cond, "index"),
    )
    image = references.all_positions(grid, cond, how if how in references.PLACES else "offset", device)
    spread = image.new_tensor((NUMBERS if how == "index" else 1, 1, 1))
    rows = torch.arange(text.shape[1], device=device)[:, None]
    guidance = (
        cond["guidance"].reshape(-1).expand(batch)
        if config["guidance_embeds"] and "guidance" in cond
        else None
    )
    return dict(
        hidden_states=torch.cat([grid.to_tokens(latent), *references.tokens(grid, cond)], dim=1),
        encoder_hidden_states=text,
        timestep=sigma.expand(batch),
        guidance=guidance,
        img_ids=torch.nn.functional.pad(image * spread, (0, 1)),
        txt_ids=torch.nn.functional.pad(rows, (3, 0)),
    )


def refusal(config, grid, cond):
    """diffusers' blocks give one timestep to all rows."""
    return references.wrong_references(grid, cond, "choose another method in Edit Model Reference Method")
