"""Flux.3: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

import torch

from . import references

#: Positions count half a token along the picture's sides.
POSITION_SCALE = 0.5


def adjust(transformer, config):
    """Modulation, which diffusers computes for every row, once for all rows of a kind."""
    for layer in (
        *transformer.early_stream_modulations.values(),
        transformer.single_stream_modulations.txt,
        transformer.norm_out.linear,
    ):
        layer.register_forward_pre_hook(lambda layer, args: (args[0][:, :1],))
    for layer in (
        transformer.single_stream_modulations.image,
        transformer.single_stream_modulations.image_cond,
    ):  # their rows are put one behind the other
        layer.forward = lambda temb, own=layer.forward: own(temb[:, :1]).expand(-1, temb.shape[1], -1)


def positions(grid, number, device):
    """(tokens, 4) of (0, y, x, number); number: 0 for the picture that is made, -1, -2, ... for
    references."""
    return torch.nn.functional.pad(
        references.positions(grid, device=device) * POSITION_SCALE, (0, 1), value=number
    )


def forward_args(config, grid, latent, sigma, cond):
    """Positions of text are (0, 0, 0, number)."""
    batch, device, text, found = (
        latent.shape[0],
        latent.device,
        cond["c_crossattn"],
        references.grids(grid, cond),
    )
    rows = torch.arange(text.shape[1], device=device)[:, None]
    given = (
        dict(
            image_cond_hidden_states=torch.cat(references.tokens(grid, cond), dim=1),
            image_cond_ids=torch.cat([positions(one, -i, device) for i, one in enumerate(found, 1)]),
        )
        if found
        else {}
    )
    return dict(
        hidden_states=grid.to_tokens(latent),
        encoder_hidden_states=text,
        timestep=sigma.expand(batch),
        img_ids=positions(grid, 0, device),
        txt_ids=torch.nn.functional.pad(rows, (3, 0)),
        **given,
    )


def refusal(config, grid, cond):
    """Distilled models are told to which noise level a step leads, which no solver here tells them."""
    if config["flow_map"]:
        return (
            "the model is a step-distilled Flux.3 (flow_map), which is not supported; use the "
            "undistilled one."
        )
    return references.wrong_references(grid, cond)
