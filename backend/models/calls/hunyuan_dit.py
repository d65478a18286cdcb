"""HunyuanDiT: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_from_grid

from ...schedule import DiscreteSchedule

TEXT, TEXT_T5 = 77, 256
#: Tokens along a side of the picture to which rotary positions are scaled.
BASE = 32


def schedule(config):
    """1.0 and 1.1 (told the picture's size) go on to stronger noise."""
    return DiscreteSchedule(0.00085, 0.03 if config["use_style_cond_and_image_meta_size"] else 0.018)


def adjust(transformer, config):
    """Timesteps are not rounded: diffusers rounds what it makes of them to their type."""
    embed = transformer.time_extra_emb
    embed.register_forward_pre_hook(
        lambda embed, args, kwargs: (
            args,
            kwargs | {"hidden_dtype": embed.timestep_embedder.linear_1.weight.dtype},
        ),
        with_kwargs=True,
    )


def rotary(config, grid, device):
    """(cos, sin), each (tokens, head size), of positions over the picture, fitted into the base square."""
    rows, columns = grid.counts[1:]
    height, width = (
        (BASE, round(BASE / rows * columns)) if rows > columns else (round(BASE / columns * rows), BASE)
    )
    axes = [
        round((BASE - size) / 2.0) + torch.arange(count, dtype=torch.float32) * (size / count)
        for size, count in ((width, columns), (height, rows))
    ]
    positions = torch.stack(torch.meshgrid(*axes, indexing="xy")).unsqueeze(1)
    return tuple(
        table.to(device)
        for table in get_2d_rotary_pos_embed_from_grid(config["attention_head_dim"], positions, use_real=True)
    )


def forward_args(config, grid, latent, timestep, cond):
    """Two prompts, of CLIP and of mT5, whose padding the model replaces."""
    batch, device = latent.shape[0], latent.device

    def mask(name, length):
        return cond[name] if name in cond else torch.ones(batch, length, dtype=torch.long, device=device)

    return dict(
        hidden_states=grid.pad(latent),
        timestep=timestep.expand(batch),
        encoder_hidden_states=cond["c_crossattn"],
        text_embedding_mask=mask("text_embedding_mask", TEXT),
        encoder_hidden_states_t5=cond["encoder_hidden_states_t5"],
        text_embedding_mask_t5=mask("text_embedding_mask_t5", TEXT_T5),
        image_meta_size=cond["image_meta_size"].expand(batch, -1) if "image_meta_size" in cond else None,
        style=torch.zeros(batch, dtype=torch.long, device=device),
        image_rotary_emb=rotary(config, grid, device),
    )


def refusal(config, grid, cond):
    """The padding that the model learned has these lengths."""
    lengths = cond["c_crossattn"].shape[1], cond["encoder_hidden_states_t5"].shape[1]
    return (
        None
        if lengths == (TEXT, TEXT_T5)
        else f"the prompts have {lengths} tokens, but HunyuanDiT in diffusers takes {TEXT} and {TEXT_T5}; "
        f"shorten the prompt."
    )
