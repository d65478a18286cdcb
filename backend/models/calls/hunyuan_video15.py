"""HunyuanVideo 1.5: the arguments of its forward, what it refuses and what is changed in diffusers'
modules."""

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0

from . import references
from .precise import round_input


class KeyMask(HunyuanVideoAttnProcessor2_0):
    """HunyuanVideo's attention with the text mask (B, text) as one over keys; 1.5's own makes a mask of rows
    x rows, gigabytes for a video."""

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
    ):
        if attention_mask is not None:
            attention_mask = (
                None
                if bool(attention_mask.all())
                else F.pad(attention_mask.bool(), (hidden_states.shape[1], 0), value=True)[:, None, None]
            )
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


def adjust(transformer, config):
    """The cheaper mask for every block; and sines of the timestep, which diffusers leaves in the timestep's
    float32, in the dtype of their layer."""
    round_input(transformer.time_embed.timestep_embedder.linear_1)
    for block in transformer.transformer_blocks:
        block.attn.set_processor(KeyMask())


def forward_args(config, grid, latent, sigma, cond):
    """Timesteps run to 1000; the image's latent and its mask are further channels (c_concat), zeros for text
    to video."""
    batch, text = latent.shape[0], cond["c_crossattn"]
    image = (
        cond["c_concat"]
        if "c_concat" in cond
        else latent.new_zeros(batch, config["in_channels"] - latent.shape[1], *latent.shape[2:])
    )

    def ones(x):
        return torch.ones(x.shape[:2], dtype=torch.long, device=x.device)

    glyphs = cond.get("txt_byt5", text.new_zeros(batch, 0, config["text_embed_2_dim"]))
    return dict(
        hidden_states=grid.pad(torch.cat([latent, image], dim=1)),
        timestep=sigma.expand(batch) * 1000,
        encoder_hidden_states=text,
        encoder_attention_mask=cond.get("attention_mask", ones(text)),
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=ones(glyphs),
        image_embeds=cond.get("clip_fea", text.new_zeros(batch, 0, config["image_embed_dim"])),
    )


def refusal(config, grid, cond):
    """The image's channels are many, or left out for text to video."""
    return references.wrong_channels(config["in_channels"], grid, cond) if "c_concat" in cond else None
