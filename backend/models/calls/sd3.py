"""Stable Diffusion 3: the arguments of its forward and what it refuses."""


def forward_args(config, grid, latent, sigma, cond):
    """A latent padded to whole tokens; timesteps run to 1000."""
    return dict(
        hidden_states=grid.pad(latent),
        encoder_hidden_states=cond["c_crossattn"],
        pooled_projections=cond["y"],
        timestep=sigma.expand(latent.shape[0]) * 1000,
    )


def refusal(config, grid, cond):
    """The position table ends."""
    most = config["pos_embed_max_size"]
    return (
        None
        if max(grid.counts) <= most
        else f"the latent is {grid.counts[1]} x {grid.counts[2]} tokens, but this model knows {most} a "
        f"side; make it smaller."
    )
