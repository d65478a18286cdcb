"""MiniMax-H3 with a table for times in single files: their keys, and the configuration that their shapes
tell."""

from dataclasses import replace

from . import minimax_h3


def config(shapes):
    """Those of MiniMax-H3, and the points of the table."""
    points, width = shapes["adaln_t_table"]
    embedder = {"time_embedder.proj_in.weight": (width, 256), "time_embedder.proj_out.weight": (width, width)}
    return minimax_h3.config({**shapes, **embedder}) | {"curve_points": points}


LAYOUT = replace(
    minimax_h3.LAYOUT,
    signature=("adaln_t_table", *(key for key in minimax_h3.LAYOUT.signature if "time_embedder" not in key)),
    config=config,
    names=minimax_h3.LAYOUT.names | {"adaln_t_table": "time_embedder.table"},
)
