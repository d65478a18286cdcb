"""Qwen-Image: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

import torch

from . import references
from .precise import keep_timestep


class Places(list):
    """The argument img_shapes with what Rotary needs: ``positions`` (tokens, 3) of latent and references, and
    where text starts."""

    def __init__(self, shapes, positions, text):
        super().__init__(shapes)
        self.positions, self.text = positions, text


class Rotary(torch.nn.Module):
    """Rotary tables, complex (rows, head size / 2), for any positions; diffusers' own has those of pictures
    of even sides alone."""

    def __init__(self, theta, axes):
        super().__init__()
        self.theta, self.axes = theta, axes

    def table(self, positions):
        parts = [
            torch.outer(
                p, 1.0 / self.theta ** (torch.arange(0, size, 2, dtype=torch.float64, device=p.device) / size)
            )
            for p, size in zip(positions.double().unbind(-1), self.axes)
        ]
        angles = torch.cat(parts, dim=-1)
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def forward(self, places, max_txt_seq_len, device):
        text = torch.arange(places.text, places.text + max_txt_seq_len, device=device)
        return self.table(places.positions.to(device)), self.table(text[:, None].expand(-1, 3))


def adjust(transformer, config):
    """Positions as in ComfyUI, and timesteps that are not rounded."""
    keep_timestep(
        transformer, transformer.time_text_embed, transformer.time_text_embed.timestep_embedder.linear_1
    )
    transformer.pos_embed = Rotary(transformer.pos_embed.theta, transformer.pos_embed.axes_dim)


def forward_args(config, grid, latent, sigma, cond):
    """Latents travel packed 2x2, references behind; diffusers multiplies the timestep by 1000 itself."""
    batch, how = latent.shape[0], references.method(cond, default_method(config))
    rows = [(1, 1, grid.tokens), (1, 1, references.rows(config, grid, cond))]
    marked = how == "index_timestep_zero"  # diffusers gives timestep zero to what is behind the first shape
    return dict(
        hidden_states=torch.cat([grid.to_tokens(latent), *references.tokens(grid, cond)], dim=1),
        encoder_hidden_states=cond["c_crossattn"],
        encoder_hidden_states_mask=cond.get("attention_mask"),
        timestep=sigma.expand(batch),
        img_shapes=Places(
            [rows if marked else [(1, 1, rows[0][2] + rows[1][2])]] * batch,
            references.all_positions(grid, cond, how, latent.device, centred=True),
            max(grid.counts[1:]) // 2,
        ),
    )


def default_method(config):
    """How references are placed where the request does not say."""
    return "index_timestep_zero" if config.get("zero_cond_t") else "index"


def refusal(config, grid, cond):
    """Only Edit 2511's blocks take two timesteps."""
    return references.wrong_references(
        grid,
        cond,
        ""
        if config.get("zero_cond_t")
        else "choose another method in Edit Model Reference Method, or load Qwen-Image-Edit 2511",
    )
