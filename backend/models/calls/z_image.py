"""Z-Image: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

import torch
from diffusers.models.transformers.transformer_z_image import FeedForward

#: Text and image are padded to a multiple of this many rows.
ROWS = 32


def adjust(transformer, config):
    """diffusers fixes these widths at what they are in the released size."""
    if "feed_forward_width" not in config:
        return
    hidden, time = config["feed_forward_width"], config["time_width"]
    for block in (*transformer.noise_refiner, *transformer.context_refiner, *transformer.layers):
        block.feed_forward = FeedForward(config["dim"], hidden)
    first, _, last = transformer.t_embedder.mlp
    transformer.t_embedder.mlp[0], transformer.t_embedder.mlp[2] = (
        torch.nn.Linear(first.in_features, time),
        torch.nn.Linear(time, last.out_features),
    )


def forward_args(config, grid, latent, sigma, cond):
    """Lists of samples, each with a time axis; the timestep counts from noise (0) to picture (1)."""
    return dict(
        x=list(grid.pad(latent).unsqueeze(2)),
        t=(1.0 - sigma).expand(latent.shape[0]),
        cap_feats=list(cond["c_crossattn"]),
    )


def refusal(config, grid, cond):
    """Position tables have an end; the text, padded, comes first, and the image stands behind it."""
    most, needed = (
        tuple(config["axes_lens"]),
        (-(-cond["c_crossattn"].shape[1] // ROWS) * ROWS + 2, *grid.counts[1:]),
    )
    return (
        None
        if all(a <= b for a, b in zip(needed, most))
        else f"{needed[0] - 2} rows of text and {needed[1]} x {needed[2]} tokens are more than this "
        f"Z-Image's position tables of {most} hold; shorten the prompt or make the latent smaller."
    )
