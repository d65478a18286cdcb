"""Flux.3: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

import torch

#: Positions count half a token along the picture's sides.
POSITION_SCALE = 0.5


def adjust(transformer, config):
    """Without the parts for reference images; and modulation, which diffusers computes for every row, once for all rows."""
    for parts in (transformer.x_embedders, transformer.early_stream_modulations, transformer.single_stream_modulations, transformer.mode_blocks):
        del parts["image_cond"]
    one_row = lambda layer, args: (args[0][:, :1],)
    for layer in (*transformer.early_stream_modulations.values(), *transformer.single_stream_modulations.values(), transformer.norm_out.linear):
        layer.register_forward_pre_hook(one_row)


def forward_args(config, grid, latent, sigma, cond):
    """Positions are (0, y, x, 0), and (0, 0, 0, number) for text."""
    batch, device, text = latent.shape[0], latent.device, cond["c_crossattn"]
    image = torch.stack(torch.meshgrid(*[torch.arange(count, device=device) for count in grid.counts], indexing="ij"), dim=-1).reshape(-1, 3) * POSITION_SCALE
    rows = torch.arange(text.shape[1], device=device)[:, None]
    return dict(
        hidden_states=grid.to_tokens(latent), encoder_hidden_states=text, timestep=sigma.expand(batch),
        img_ids=torch.nn.functional.pad(image, (0, 1)), txt_ids=torch.nn.functional.pad(rows, (3, 0)))


def refusal(config, grid, cond):
    """Distilled models are told to which noise level a step leads, which no solver here tells them."""
    return "the model is a step-distilled Flux.3 (flow_map), which is not supported; use the undistilled one." if config["flow_map"] else None
