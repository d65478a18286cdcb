"""Lumina 2: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

import torch

#: Most rows of a prompt, and most tokens along a side of the picture, in the position tables; diffusers' own
#: end at 300 and 512.
LENGTHS = (4096, 1024, 1024)


def adjust(transformer, config):
    """Longer position tables: ComfyUI computes any position."""
    rope = transformer.rope_embedder
    rope.freqs_cis = rope._precompute_freqs_cis(rope.axes_dim, LENGTHS, rope.theta)


def forward_args(config, grid, latent, sigma, cond):
    """The timestep counts from noise (0) to picture (1). ComfyUI's model reads every row of the prompt,
    padding too."""
    text = cond["c_crossattn"]
    mask = torch.ones(text.shape[:2], dtype=torch.int32, device=text.device)
    return dict(
        hidden_states=grid.pad(latent),
        timestep=(1.0 - sigma).expand(latent.shape[0]),
        encoder_hidden_states=text,
        encoder_attention_mask=mask,
    )


def refusal(config, grid, cond):
    """Position tables have an end."""
    rows = (cond["c_crossattn"].shape[1], *grid.counts[1:])
    return (
        None
        if all(a < b for a, b in zip(rows, LENGTHS))
        else f"{rows[0]} rows of text and {rows[1]} x {rows[2]} tokens are more than the {LENGTHS} that "
        f"Lumina 2 counts; shorten the prompt or make the latent smaller."
    )
