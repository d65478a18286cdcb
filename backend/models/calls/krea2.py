"""Krea 2: the arguments of its forward and what it refuses."""

import torch

from . import references


def given(cond):
    """``cond`` with the references that ComfyUI's model reads: none where no method is set."""
    return cond if "ref_latents_method" in cond else {}


def forward_args(config, grid, latent, sigma, cond):
    """Latents travel packed 2x2, references behind; positions are (number, y, x) and zeros for text. The
    prompt's layers come side by side."""
    text = cond["c_crossattn"].unflatten(-1, (config["num_text_layers"], -1))
    image = references.all_positions(grid, given(cond), "index", latent.device)
    return dict(
        hidden_states=torch.cat([grid.to_tokens(latent), *references.tokens(grid, given(cond))], dim=1),
        encoder_hidden_states=text,
        timestep=sigma.expand(latent.shape[0]),
        position_ids=torch.cat([image.new_zeros(text.shape[1], 3), image]),
    )


def refusal(config, grid, cond):
    """ComfyUI runs frames as a batch; one frame is all that the model makes. diffusers' blocks give one
    timestep to all rows."""
    wrong = references.wrong_references(grid, cond, "choose index in Edit Model Reference Method")
    if wrong:
        return wrong
    return (
        None
        if grid.counts[0] == 1
        else f"the latent has {grid.counts[0]} frames, but Krea 2 makes one picture; use a batch instead."
    )
