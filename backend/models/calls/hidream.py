"""HiDream: the arguments of its forward and what is changed in diffusers' modules."""

from functools import partial

import torch


def patchify(patch, latent):
    """As the model's own for squares: (B, C, H, W) -> rows (p1 p2 C), no mask, sizes, positions; its own pads
    other pictures to the largest size."""
    batch, (rows, columns) = latent.shape[0], (side // patch for side in latent.shape[2:])
    tokens = (
        latent.unflatten(3, (columns, patch))
        .unflatten(2, (rows, patch))
        .permute(0, 2, 4, 3, 5, 1)
        .reshape(batch, rows * columns, -1)
    )
    ids = torch.stack(
        torch.meshgrid(torch.arange(1), torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1
    ).reshape(1, -1, 3)
    return tokens, None, [(rows, columns)] * batch, ids.float().expand(batch, -1, -1).to(latent.device)


def adjust(transformer, config):
    """Pictures of any shape."""
    transformer.patchify = partial(patchify, config["patch_size"])


def forward_args(config, grid, latent, sigma, cond):
    """Llama's layers (B, layers, rows, width) in the order of the blocks; blocks behind the last layer read
    that one."""
    llama = cond["encoder_hidden_states_llama3"].unbind(1)
    return dict(
        hidden_states=grid.pad(latent),
        timesteps=sigma.expand(latent.shape[0]) * 1000,
        encoder_hidden_states_t5=cond["c_crossattn"],
        encoder_hidden_states_llama3=[
            llama[min(i, len(llama) - 1)] for i in range(max(config["llama_layers"]) + 1)
        ],
        pooled_embeds=cond["y"],
    )
