"""LTX-Video in single files: their keys, and the configuration that their shapes tell."""

import json

from ...loading.layout import Layout, blocks_of

HEADS = 32


def config(shapes):
    """Arguments of LTXVideoTransformer3DModel."""
    hidden, channels = shapes["patchify_proj.weight"]
    return dict(
        in_channels=channels,
        out_channels=shapes["proj_out.weight"][0],
        num_attention_heads=HEADS,
        attention_head_dim=hidden // HEADS,
        cross_attention_dim=shapes["transformer_blocks.0.attn2.to_k.weight"][1],
        num_layers=blocks_of(shapes, "transformer_blocks"),
        caption_channels=shapes["caption_projection.linear_1.weight"][1],
    )


def metadata(strings):
    """Lightricks' own configuration tells of causal positions (since 0.9.5), which no shape shows."""
    told = json.loads(strings.get("config", "{}")).get("transformer", {})
    return {"causal_temporal_positioning": bool(told.get("causal_temporal_positioning", False))}


block = "transformer_blocks.{}"
LAYOUT = Layout(
    signature=(
        "patchify_proj.weight",
        "adaln_single.emb.timestep_embedder.linear_1.weight",
        "caption_projection.linear_1.weight",
        "scale_shift_table",
        "transformer_blocks.0.attn1.q_norm.weight",
        "proj_out.weight",
    ),
    absent=(
        "audio_adaln_single.linear.weight",
        "prompt_adaln_single.linear.weight",
        "transformer_blocks.0.attn1.to_gate_logits.weight",
    ),
    config=config,
    metadata=metadata,
    names={
        "patchify_proj": "proj_in",
        "adaln_single.linear": "time_embed.linear",
        "adaln_single.emb.timestep_embedder.linear_1": "time_embed.emb.timestep_embedder.linear_1",
        "adaln_single.emb.timestep_embedder.linear_2": "time_embed.emb.timestep_embedder.linear_2",
        f"{block}.attn1.q_norm": f"{block}.attn1.norm_q",
        f"{block}.attn1.k_norm": f"{block}.attn1.norm_k",
        f"{block}.attn2.q_norm": f"{block}.attn2.norm_q",
        f"{block}.attn2.k_norm": f"{block}.attn2.norm_k",
    },
)
