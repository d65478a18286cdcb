"""Wan VACE of Alibaba (2.1, 2.2 Fun), video to video with masks and images: Wan whose every second to fifth
block has a control block at its side; both states of a token travel together."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from . import wan
from .common import wan_blocks
from .common.call_state import call_state
from .family import Family, ModelIO, count_none
from .key_layout import blocks_of, under


class VaceBlock(wan_blocks.WanBlock):
    """A block of Wan, and its control block where it has one (``control``, else None).

    hidden_states: (B, tokens, width times 1 + videos), the token's state and that of each control video.
    call: what patch_module's hooks keep of the call under way.
    """

    control: nn.Module | None
    call: SimpleNamespace

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb):
        width = self.scale_shift_table.shape[-1]
        state, *videos = hidden_states.split(width, dim=-1)
        arguments = (encoder_hidden_states, temb, rotary_emb)
        out = super().forward(state, *arguments)
        if self.control is not None:
            for number, video in enumerate(videos):
                hint, videos[number] = self.control(state, encoder_hidden_states, video, temb, rotary_emb)
                # in place: the product of a number in float32, rounded once, as ComfyUI has it
                out = out + hint.mul_(self.call.vace_strength[:, number, None, None])
        return torch.cat([out, *videos], dim=-1)


def patch_module(transformer, config):
    """Give control blocks to the blocks at whose side they are, and run Wan's own forward: diffusers' runs
    all control blocks before the others."""
    control = list(transformer.vace_blocks)
    del transformer.vace_blocks
    call = call_state(transformer, {"vace_context": None, "vace_strength": None})
    width = config["num_attention_heads"] * config["attention_head_dim"]
    control_of_block = dict(zip(config["vace_layers"], control))
    for index, block in enumerate(transformer.blocks):
        block.__class__ = VaceBlock
        block.call = call
        block.control = control_of_block.get(index)
        block.attn1.set_processor(wan_blocks.SelfAttention())
    for block in control:
        block.__class__ = wan_blocks.ControlBlock
        block.attn1.set_processor(wan_blocks.SelfAttention())

    def embed(convolution, args, x):
        videos = [transformer.vace_patch_embedding(video) for video in call.vace_context.unbind(1)]
        return torch.cat([x, *videos], dim=1)

    transformer.forward = WanTransformer3DModel.forward.__get__(transformer)
    transformer.patch_embedding.register_forward_hook(embed)
    transformer.norm_out.register_forward_pre_hook(lambda norm, args: (args[0][..., :width],))


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward. vace_context: control videos and their masks (B, videos, C, T, H,
    W). vace_strength (B, videos): of each."""
    context = cond["vace_context"]
    return dict(
        hidden_states=grid.pad(latent),
        encoder_hidden_states=cond["c_crossattn"],
        timestep=sigma.expand(latent.shape[0]) * 1000,
        vace_context=context,
        vace_strength=cond.get("vace_strength", context.new_ones(1, context.shape[1])),
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. Control videos have the latent's padded size, which their
    convolution must divide."""
    context: Tensor = cond["vace_context"]
    wanted = (config["vace_in_channels"], *grid.padded.shape[1:])
    # check_arguments has refused empty ones before
    if tuple(context.shape[2:]) != wanted:
        return (
            f"vace_context has shape {list(context.shape)}, but this model takes (batch, videos, "
            f"{', '.join(map(str, wanted))}) for a latent of {' x '.join(map(str, grid.shape[1:]))}; give "
            f"WanVaceToVideo the latent's size, and the latent even sides."
        )
    return wan.refusal(config, grid, {"c_crossattn": cond["c_crossattn"]})


def config_from_shapes(shapes):
    """Return the arguments of the diffusers class; control blocks are at equal distances, as in ComfyUI."""
    layers = blocks_of(shapes, "blocks")
    control = blocks_of(shapes, "vace_blocks")
    return wan.config_from_shapes(shapes) | dict(
        vace_layers=list(range(0, layers, max(1, layers // control))),
        vace_in_channels=shapes[CONTROL_INPUT][1],
    )


#: The key of files with control blocks.
CONTROL_INPUT = "vace_patch_embedding.weight"
CONTROL = {
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "before_proj": "proj_in",
    "after_proj": "proj_out",
    **under("self_attn", "attn1", wan.ATTENTION),
    **under("cross_attn", "attn2", wan.ATTENTION),
}


def control_names(config):
    """Return Layout.names of the control blocks: the number of one in the file is not that of its block."""
    names = {}
    for number, block in enumerate(config["vace_layers"]):
        names |= under(f"vace_blocks.{number}", f"blocks.{block}.control", CONTROL)
    return names


def moved(config):
    """Return Layout.moved: where diffusers' files keep the control blocks."""
    return {
        f"blocks.{block}.control.": f"vace_blocks.{number}."
        for number, block in enumerate(config["vace_layers"])
    }


LAYOUT = replace(
    wan.LAYOUT,
    signature=(*wan.LAYOUT.signature, CONTROL_INPUT),
    absent=(),
    config=config_from_shapes,
    moved=moved,
)


def count_attention_calls(block: Any) -> int:
    """Count the calls of attention: of the block, and of its control block for each control video."""
    return 2 if block.control is None else 2 + 2 * block.call.vace_context.shape[1]


FAMILY: Family = wan.FAMILY.changed(
    {
        "name": "wan-vace",
        "transformer": "WanVACETransformer3DModel",
        "io": ModelIO(arguments=forward_args),
        "blocks.attention": ("image", "cross", "image", "cross"),
        "blocks.count_attention_calls": count_attention_calls,
        "blocks.values": (("attn1.to_v",), ("control.attn1.to_v",)),
        "blocks.control_layers": ("control.*",),
        "conditioning.accepted": ("c_crossattn", "vace_context", "vace_strength", "clip_fea"),
        "conditioning.required": ("c_crossattn", "vace_context"),
        "conditioning.ignored": ("clip_fea",),
        "conditioning.precise": ("vace_strength",),
        "conditioning.controls": lambda cond: cond["vace_context"].shape[1],
        "conditioning.image_features": count_none,
        "conditioning.refusal": refusal,
        "cache.token_modules": ("patch_embedding", "vace_patch_embedding"),
        "cache.prompt_layers": ("attn2.to_k", "attn2.to_v", "control.attn2.to_k", "control.attn2.to_v"),
        "build.patch_module": patch_module,
        "layout": LAYOUT,
        "variant": lambda config: {
            "layout": replace(LAYOUT, names={**LAYOUT.names, **control_names(config)}),
        },
    }
)
