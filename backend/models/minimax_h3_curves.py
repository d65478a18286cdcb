"""MiniMax-H3 in a file of ComfyUI's that keeps the timestep's embedding as a table: points on a curve, on
whose few coordinates small modulation layers work."""

from dataclasses import replace

from . import minimax_h3
from .calls.minimax_h3_curves import adjust
from .layouts.minimax_h3_curves import LAYOUT

FAMILY = replace(
    minimax_h3.FAMILY,
    name="minimax-h3-curves",
    adjust=adjust,
    modulation=(),
    float32=(*minimax_h3.FAMILY.float32, "*.adaln_proj.*", "norm_out.linear.*"),
    layout=LAYOUT,
)
