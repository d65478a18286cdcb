"""Ideogram 4: 34 blocks over one stream of text and image; the prompt is thirteen layers of the text encoder
side by side, latents have 128 channels."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_ideogram4 import (
    IMAGE_POSITION_OFFSET,
    LLM_TOKEN_INDICATOR,
    OUTPUT_IMAGE_INDICATOR,
    Ideogram4AttnProcessor,
)

from .blocks import JOINED, Blocks
from .common.call_state import call_state
from .common.request_arguments import once
from .common.timestep_precision import round_input
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO, prompt_tokens
from .key_layout import Layout, blocks_of

#: Latent cells of the autoencoder in a token, which the model has slowest and ComfyUI's latent fastest.
CELLS = 4


class WholeSequenceAttention(Ideogram4AttnProcessor):
    """Attention without a mask where one sample is one segment."""

    def __call__(self, attn, hidden_states, attention_mask: Any = None, image_rotary_emb=None):
        mask: Any = None if attention_mask.shape[-1] == 1 else attention_mask
        return super().__call__(attn, hidden_states, mask, image_rotary_emb)


class Prompt:
    """Sends the prompt's tokens alone through its wide layers; diffusers also sends zeros for the image's."""

    def __init__(self, transformer):
        self.norm = transformer.llm_cond_norm.forward
        self.call = call_state(transformer, text=None, total=0)
        transformer.register_forward_pre_hook(self.take, with_kwargs=True)
        transformer.llm_cond_norm.forward = lambda zeros: self.norm(self.call.text)
        transformer.llm_cond_proj.register_forward_hook(
            lambda layer, args, out: F.pad(out, (0, 0, 0, self.call.total - out.shape[1]))
        )

    def take(self, transformer, args, kwargs):
        text = kwargs["encoder_hidden_states"]
        self.call.text = text
        self.call.total = kwargs["hidden_states"].shape[1]
        return args, kwargs | {"encoder_hidden_states": text.new_zeros(1, 1, 1)}


def patch_module(transformer, config):
    """Patch the transformer: less work for the prompt and the mask. Sines of the timestep, made in float32,
    are given in their layer's dtype."""
    Prompt(transformer)
    round_input(transformer.t_embedding.mlp_in)
    for layer in transformer.layers:
        layer.attention.set_processor(WholeSequenceAttention())


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. Text is at (i, i, i), the image at (0, y, x) far from it; tokens
    that the prompt's mask hides are a segment. The timestep counts from noise (0) to image (1). Without a
    prompt the image is all."""
    batch = tokens.shape[0]
    words = prompt_tokens(cond)
    # where no token is text, diffusers multiplies what this one becomes by 0
    text = cond["c_crossattn"] if words else tokens.new_zeros(batch, 1, config["llm_features_dim"])
    places = once(cond, "places", lambda: _places(grid, cond, batch, tokens.device))
    cells = tokens.unflatten(2, (-1, CELLS)).transpose(2, 3).flatten(2)
    return dict(
        hidden_states=F.pad(cells, (0, 0, words, 0)),
        timestep=(1.0 - sigma).expand(batch),
        encoder_hidden_states=text,
        **places,
    )


def _places(grid, cond, batch, device):
    """Return the positions, segments and kinds of the tokens."""
    text_tokens = prompt_tokens(cond)
    axes = [torch.arange(count, device=device) for count in grid.counts]
    image = torch.cartesian_prod(*axes) + IMAGE_POSITION_OFFSET
    words = torch.arange(text_tokens, device=device)[:, None].expand(text_tokens, 3)
    kinds = [LLM_TOKEN_INDICATOR] * text_tokens + [OUTPUT_IMAGE_INDICATOR] * len(image)
    kinds = torch.tensor(kinds, device=device).repeat(batch, 1)
    segments = torch.ones(batch, 1, device=device)
    if text_tokens and "attention_mask" in cond and not bool(cond["attention_mask"].all()):
        shown = cond["attention_mask"].bool().expand(batch, text_tokens)
        kinds[:, :text_tokens] *= shown
        segments = F.pad(shown.long(), (0, len(image)), value=1)
    positions = torch.cat([words, image]).expand(batch, -1, -1)
    return {"position_ids": positions, "segment_ids": segments, "indicator": kinds}


def output(output, grid):
    """Return the image's tokens, back in ComfyUI's order of cells."""
    return -output[:, -grid.tokens :].unflatten(2, (CELLS, -1)).transpose(2, 3).flatten(2)


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
    latent=Latent(patch=lambda config: (1, 1, 1), frames=False, pixels=lambda config: (1, 16, 16)),
    io=ModelIO(forward_args, takes_tokens=True, output=output),
    blocks=Blocks(
        output_layer="final_layer",
        lists={"layers": JOINED},
        text_position="first",
        values=(("attention.to_v",),),
        flop_shares={"adaln_modulation": lambda config: 0},
        per_token={"image_rotary_emb": ("joint", 1)},
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "attention_mask"),
        widths=lambda config: {"c_crossattn": config["llm_features_dim"]},
        required=(),
    ),
    build=Build(patch_module=patch_module),
    cache=Cache(prompt_modules=("rotary_emb", "llm_cond_proj"), image_modules=("input_proj",)),
    layout=LAYOUT,
)
