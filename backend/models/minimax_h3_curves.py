"""MiniMax-H3 in a file of ComfyUI's that keeps the timestep's embedding as a table: points on a curve, on
whose few coordinates small modulation layers work."""

from dataclasses import replace
from typing import Any

import torch
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3AdaLayerNormModulation,
    MiniMaxH3AdaLayerNormOut,
)
from torch import nn

from . import minimax_h3


class Curve(nn.Module):
    """Times (n,) in [0, 1] -> coordinates (n, D), on the straight line between the table's nearest points."""

    def __init__(self, points: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(points, width), requires_grad=False)

    def forward(self, times):
        place = times.clamp(0.0, 1.0) * (len(self.table) - 1)
        low = place.floor().long().clamp(max=len(self.table) - 2)
        return torch.lerp(self.table[low], self.table[low + 1], (place - low)[:, None])


class Modulation(MiniMaxH3AdaLayerNormModulation):
    """Compute modulation without the activation, and in float32 up to its result.

    ``weight_source``: the norm whose weights have the result's dtype, in a tuple: no submodule.
    """

    weight_source: tuple[Any]

    def forward(self, temb):
        values = self.linear(temb).view(-1, 6 * self.hidden_size)
        return values.to(self.weight_source[0].weight.dtype).chunk(6, dim=-1)


class Out(MiniMaxH3AdaLayerNormOut):
    """The same of the last norm."""

    def forward(self, hidden_states, temb, timestep_indices):
        values = self.linear(temb).to(hidden_states.dtype).index_select(0, timestep_indices)
        shift, scale = values.chunk(2, dim=-1)
        return self.norm(hidden_states) * (1.0 + scale) + shift


def patch_module(transformer, config):
    """Put the table in the place of sines and their layers."""
    minimax_h3.patch_module(transformer, config)
    transformer.time_proj = nn.Identity()
    transformer.time_embedder = Curve(config["curve_points"], config["time_embed_dim"])
    for block in transformer.transformer_blocks:
        block.adaln_proj.__class__ = Modulation
        block.adaln_proj.weight_source = (block.norm1,)
    transformer.norm_out.__class__ = Out


def config_from_shapes(shapes):
    """Return MiniMax-H3's arguments, and the points of the table."""
    points, width = shapes["adaln_t_table"]
    embedder = {"time_embedder.proj_in.weight": (width, 256), "time_embedder.proj_out.weight": (width, width)}
    return minimax_h3.config_from_shapes({**shapes, **embedder}) | {"curve_points": points}


LAYOUT = replace(
    minimax_h3.LAYOUT,
    signature=("adaln_t_table", *(key for key in minimax_h3.LAYOUT.signature if "time_embedder" not in key)),
    config=config_from_shapes,
    names={**minimax_h3.LAYOUT.names, "adaln_t_table": "time_embedder.table"},
    unread=dict.fromkeys(("adaln_basis", "adaln_mean"), "what some merges keep of how the table was made"),
)
FAMILY = minimax_h3.FAMILY.changed(
    {
        "name": "minimax-h3-curves",
        "cache.modulation": (),
        "build.patch_module": patch_module,
        "build.float32": (*minimax_h3.FAMILY.build.float32, "*.adaln_proj.*", "norm_out.linear.*"),
        "layout": LAYOUT,
    }
)
