"""Ideogram 4: 34 blocks over one stream of text and image; the prompt is thirteen layers of the text encoder
side by side, latents have 128 channels."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_ideogram4 as theirs

from .blocks import JOINED, Blocks
from .common.request_arguments import once
from .common.shape_only import has_values, join
from .common.timestep_precision import round_input
from .config_values import NO_SHARE, constant, entries
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO, prompt_tokens
from .key_layout import Layout, blocks_of

#: Latent cells of the autoencoder in a token, which the model has slowest and ComfyUI's latent fastest.
CELLS = 4


class WholeSequenceAttention(theirs.Ideogram4AttnProcessor):
    """Attention without a mask where one sample is one segment."""

    def __call__(self, attn, hidden_states, attention_mask: Any = None, image_rotary_emb=None):
        mask: Any = None if attention_mask.shape[-1] == 1 else attention_mask
        return super().__call__(attn, hidden_states, mask, image_rotary_emb)


class Joint(theirs.Ideogram4Transformer2DModel):
    """diffusers' model with text and image each in layers of their own: its own gives both, with zeros in the
    other's places, to all. The last layer sees image tokens alone."""

    # its own arguments, which the family's file alone passes
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states,
        encoder_hidden_states,
        timestep,
        position_ids,
        segment_ids,
        shown=None,
        return_dict=True,
    ):
        """encoder_hidden_states: (B, tokens, D), None without a prompt. shown: (B, tokens, 1), 0 for those
        that the prompt's mask hides, None where it hides none."""
        of_text, of_image = self.embed_image_indicator.weight
        joint = self.input_proj(hidden_states)
        joint = joint + of_image if has_values(joint) else joint
        text_tokens = 0
        if encoder_hidden_states is not None:
            text_tokens = encoder_hidden_states.shape[1]
            text = self.llm_cond_proj(self.llm_cond_norm(encoder_hidden_states))
            text = (text if shown is None else text * shown) + of_text
            joint = join([text, joint])
        modulation = F.silu(self.adaln_proj(self.t_embedding(timestep)[:, None]))
        rotary_emb = tuple(each.to(joint.dtype) for each in self.rotary_emb(position_ids))
        mask = (segment_ids[:, :, None] == segment_ids[:, None])[:, None]
        for layer in self.layers:
            joint = layer(joint, mask, rotary_emb, modulation)
        return (self.final_layer(joint[:, text_tokens:], conditioning=modulation),)


def patch_module(transformer, config):
    """Patch the transformer: less work for text, image and mask. Sines of the timestep, made in float32,
    are given in their layer's dtype."""
    transformer.__class__ = Joint
    round_input(transformer.t_embedding.mlp_in)
    for layer in transformer.layers:
        layer.attention.set_processor(WholeSequenceAttention())


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. Text is at (i, i, i), the image at (0, y, x) far from it; tokens
    that the prompt's mask hides are a segment. The timestep counts from noise (0) to image (1). Without a
    prompt the image is all."""
    batch = tokens.shape[0]
    places = once(cond, "places", _places, grid, cond, batch, tokens.device)
    return dict(
        hidden_states=tokens.unflatten(2, (-1, CELLS)).transpose(2, 3).flatten(2),
        timestep=(1.0 - sigma).expand(batch),
        encoder_hidden_states=cond["c_crossattn"].expand(batch, -1, -1) if prompt_tokens(cond) else None,
        **places,
    )


def _places(grid, cond, batch, device):
    """Return the positions and segments of all tokens, and which of the text are shown."""
    text_tokens = prompt_tokens(cond)
    axes = [torch.arange(count, device=device) for count in grid.counts]
    image = torch.cartesian_prod(*axes) + theirs.IMAGE_POSITION_OFFSET
    words = torch.arange(text_tokens, device=device)[:, None].expand(text_tokens, 3)
    segments = torch.ones(batch, 1, device=device)
    shown = None
    if text_tokens and "attention_mask" in cond and not bool(cond["attention_mask"].all()):
        mask = cond["attention_mask"].bool().expand(batch, text_tokens)
        segments = F.pad(mask.long(), (0, len(image)), value=1)
        shown = mask[..., None].to(cond["c_crossattn"].dtype)
    positions = torch.cat([words, image]).expand(batch, -1, -1)
    return {"position_ids": positions, "segment_ids": segments, "shown": shown}


def output(output, grid):
    """Return the tokens back in ComfyUI's order of cells."""
    return -output.unflatten(2, (CELLS, -1)).transpose(2, 3).flatten(2)


#: Frequencies of the position axes (time, height, width).
SECTIONS = (24, 20, 20)


def config_from_shapes(shapes):
    hidden, channels = shapes["input_proj.weight"]
    head = shapes["layers.0.attention.norm_q.weight"][0]
    most = [(head // 2 - 1 - axis) // 3 + 1 for axis in range(3)]
    return dict(
        in_channels=channels,
        num_layers=blocks_of(shapes, "layers"),
        attention_head_dim=head,
        num_attention_heads=hidden // head,
        intermediate_size=shapes["layers.0.feed_forward.w1.weight"][0],
        adaln_dim=shapes["adaln_proj.weight"][0],
        llm_features_dim=shapes["llm_cond_norm.weight"][0],
        mrope_section=tuple(map(min, SECTIONS, most)),
    )


LAYOUT = Layout(
    signature=(
        "input_proj.weight",
        "llm_cond_norm.weight",
        "embed_image_indicator.weight",
        "layers.0.attention.qkv.weight",
        "layers.0.adaln_modulation.weight",
        "final_layer.linear.weight",
    ),
    config=config_from_shapes,
    names={
        "layers.{}.attention.qkv": " ".join(f"layers.{{}}.attention.to_{part}" for part in "qkv"),
        "layers.{}.attention.o": "layers.{}.attention.to_out.0",
    },
)
FAMILY = Family(
    name="ideogram4",
    transformer="Ideogram4Transformer2DModel",
    latent=Latent(patch=constant(1, 1, 1), frames=False, pixels=constant(1, 16, 16)),
    io=ModelIO(forward_args, takes_tokens=True, output=output),
    blocks=Blocks(
        output_layer="final_layer",
        lists={"layers": JOINED},
        text_position="first",
        values=(("attention.to_v",),),
        flop_shares={"adaln_modulation": NO_SHARE},
        per_token={"image_rotary_emb": ("joint", 1)},
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "attention_mask"),
        widths=entries(c_crossattn="llm_features_dim"),
        required=(),
    ),
    build=Build(patch_module=patch_module),
    cache=Cache(
        prompt_modules=("rotary_emb", "llm_cond_proj"),
        step_modules=("t_embedding", "adaln_proj", "final_layer.adaln_modulation"),
        image_modules=("input_proj",),
        token_modules=("input_proj",),
    ),
    layout=LAYOUT,
)
