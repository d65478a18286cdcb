"""Flux.2: the arguments of its forward."""

import torch


def forward_args(config, grid, latent, sigma, cond):
    """Positions are (0, y, x, 0), and (0, 0, 0, number) for text. diffusers multiplies timestep and guidance by 1000 itself."""
    batch, device, text = latent.shape[0], latent.device, cond["c_crossattn"]
    image = torch.stack(torch.meshgrid(*[torch.arange(count, device=device) for count in grid.counts], indexing="ij"), dim=-1).reshape(-1, 3)
    rows = torch.arange(text.shape[1], device=device)[:, None]
    guidance = cond["guidance"].reshape(-1).expand(batch) if config["guidance_embeds"] and "guidance" in cond else None
    return dict(
        hidden_states=grid.to_tokens(latent), encoder_hidden_states=text, timestep=sigma.expand(batch), guidance=guidance,
        img_ids=torch.nn.functional.pad(image, (0, 1)), txt_ids=torch.nn.functional.pad(rows, (3, 0)))
