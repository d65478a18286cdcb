"""CogVideoX: the arguments of its forward and what it refuses."""

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from . import references


def rotary(config, grid, device):
    """(cos, sin), each (tokens, head size), of axes (1/4, 3/8, 3/8); before 1.5 ComfyUI stretches the
    picture's axes."""
    head, stretch = (
        config["attention_head_dim"],
        1.0 if config.get("patch_size_t") else config.get("spatial_interpolation_scale", 1.875),
    )
    sizes, scales = (head // 4, head // 8 * 3, head // 8 * 3), (1.0, stretch, stretch)
    tables = [
        get_1d_rotary_pos_embed(size, torch.arange(count, device=device) * scale, use_real=True)
        for size, count, scale in zip(sizes, grid.counts, scales)
    ]
    index = torch.meshgrid(*[torch.arange(count, device=device) for count in grid.counts], indexing="ij")
    return tuple(
        torch.cat([table[part][i.reshape(-1)] for table, i in zip(tables, index)], dim=-1) for part in (0, 1)
    )


def forward_args(config, grid, latent, timestep, cond):
    """Time comes before channels; image to video has the image's latent as further channels (c_concat)."""
    batch = latent.shape[0]
    return dict(
        hidden_states=grid.pad(references.with_channels(latent, cond)).transpose(1, 2),
        encoder_hidden_states=cond["c_crossattn"],
        timestep=timestep.expand(batch),
        ofs=cond["ofs"].reshape(-1).expand(batch) if "ofs" in cond else None,
        image_rotary_emb=rotary(config, grid, latent.device)
        if config["use_rotary_positional_embeddings"]
        else None,
    )


def refusal(config, grid, cond):
    """A learned position table fits one size, and one of sines one length of the prompt."""
    rows, most = cond["c_crossattn"].shape[1], config.get("max_text_seq_length", 226)
    if not config["use_rotary_positional_embeddings"] and rows != most:
        return (
            f"the prompt has {rows} rows, but this model's position table is for {most}; pad the "
            f"prompt to {most} tokens, as ComfyUI's CogVideoX text encoder does."
        )
    size = config["sample_height"], config["sample_width"]
    if not config["use_learned_positional_embeddings"] or grid.padded.shape[-2:] == size:
        return references.wrong_channels(config["in_channels"], grid, cond)
    return (
        f"the latent is {grid.shape[-2]} x {grid.shape[-1]}, but this model makes videos of {size[0]} "
        f"x {size[1]} latent pixels only."
    )
