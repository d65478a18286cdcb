"""Wan: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

from functools import partial

import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from . import references

#: Tokens along a side of the video, at most, where the configuration does not tell.
MOST = 1024


class ImageFirst(WanAttnProcessor):
    """Attention to image features and then to text, of any length; diffusers' own takes a text of 512 rows.
    ``rows``: of image features."""

    rows = 0

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        image, text = encoder_hidden_states[:, : self.rows], encoder_hidden_states[:, self.rows :]

        def apart(x):
            return x.unflatten(2, (attn.heads, -1)).transpose(1, 2)

        query = apart(attn.norm_q(attn.to_q(hidden_states)))
        pairs = [
            (attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image)),
            (attn.norm_k(attn.to_k(text)), attn.to_v(text)),
        ]
        read = [F.scaled_dot_product_attention(query, apart(key), apart(value)) for key, value in pairs]
        return attn.to_out[1](attn.to_out[0](sum(read).transpose(1, 2).flatten(2)))


def embed_image(embedder, processor, features):
    """(B, rows, D) CLIP features -> as the blocks read them. First and last frame models have learned
    positions, of which ComfyUI uses as many as there are rows."""
    if embedder.pos_embed is not None:
        features = features[:, : embedder.pos_embed.shape[1]] + embedder.pos_embed[:, : features.shape[1]]
    processor.rows = features.shape[1]
    return embedder.norm2(embedder.ff(embedder.norm1(features)))


def adjust(transformer, config):
    """Image features and text of any length."""
    embedder, processor = transformer.condition_embedder.image_embedder, ImageFirst()
    if embedder is not None:
        embedder.forward = partial(embed_image, embedder, processor)
        for block in transformer.blocks:
            block.attn2.set_processor(processor)


def forward_args(config, grid, latent, sigma, cond):
    """Image to video: the image's latent and its mask come as further channels (c_concat), its CLIP features
    as clip_fea; 2.2's 5B is given frames by a timestep for each, the part of a frame that the mask has
    denoised."""
    timestep = sigma.expand(latent.shape[0]) * 1000
    if "denoise_mask" in cond:
        frames = cond["denoise_mask"].float().mean(dim=(1, 3, 4)) * timestep[:, None]
        timestep = frames.repeat_interleave(grid.counts[1] * grid.counts[2], dim=1)
    return dict(
        hidden_states=grid.pad(references.with_channels(latent, cond)),
        encoder_hidden_states=cond["c_crossattn"],
        encoder_hidden_states_image=cond.get("clip_fea") if config["image_dim"] else None,
        timestep=timestep,
    )


def refusal(config, grid, cond):
    """2.1's image to video models read CLIP features; the position table ends."""
    if max(grid.counts) > config.get("rope_max_seq_len", MOST):
        return (
            f"the latent is {' x '.join(map(str, grid.counts))} tokens, but this model knows "
            f"{config.get('rope_max_seq_len', MOST)} a side; make it smaller."
        )
    if config["image_dim"] and "clip_fea" not in cond:
        return (
            "clip_fea is missing, which this image to video model needs; connect CLIP Vision Encode to "
            "WanImageToVideo."
        )
    if config["image_dim"] and cond["clip_fea"].shape[-1] != config["image_dim"]:
        return (
            f"clip_fea has width {cond['clip_fea'].shape[-1]}, but this model reads "
            f"{config['image_dim']}; use the CLIP Vision model of Wan (CLIP-ViT-H)."
        )
    return references.wrong_channels(config["in_channels"], grid, cond)
