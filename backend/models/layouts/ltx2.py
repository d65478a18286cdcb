"""LTX-2, 2.3 and 2.5 in single files: their keys, and the configuration that their shapes tell."""

import json

from ...loading.layout import Layout, blocks_of
from ..spec import Beside

HEADS = 32
#: Heads of the released connectors, by their width, and of smaller ones.
CONNECTOR_HEADS, SMALL_CONNECTOR_HEADS = {3840: 30, 4096: 32, 2048: 32}, 4


def config(shapes):
    """Arguments of LTX2VideoTransformer3DModel. What no shape tells is as in the released files, which tell
    it in their header."""
    (hidden, channels), (audio, heard) = shapes["patchify_proj.weight"], shapes["audio_patchify_proj.weight"]
    block = {
        key.removeprefix("transformer_blocks.0."): shape
        for key, shape in shapes.items()
        if key.startswith("transformer_blocks.0.")
    }
    gated, modulated, caption = (
        "attn1.to_gate_logits.weight" in block,
        block["scale_shift_table"][0] == 9,
        shapes.get("caption_projection.linear_1.weight"),
    )
    return dict(
        in_channels=channels,
        out_channels=shapes["proj_out.weight"][0],
        num_attention_heads=HEADS,
        attention_head_dim=hidden // HEADS,
        cross_attention_dim=shapes["transformer_blocks.0.attn2.to_k.weight"][1],
        audio_in_channels=heard,
        audio_out_channels=shapes["audio_proj_out.weight"][0],
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=audio // HEADS,
        audio_cross_attention_dim=shapes["transformer_blocks.0.audio_attn2.to_k.weight"][1],
        num_layers=blocks_of(shapes, "transformer_blocks"),
        gated_attn=gated,
        audio_gated_attn=gated,
        cross_attn_mod=modulated,
        audio_cross_attn_mod=modulated,
        use_prompt_embeddings=caption is not None,
        **({"caption_channels": caption[1]} if caption else {}),
        ff_bias="ff.net.2.bias" in block,
        audio_ff_bias="audio_ff.net.2.bias" in block,
        use_prompt_adaln_single="prompt_adaln_single.linear.weight" in shapes,
        use_keyframes_abs_pos_embedding="keyframes_abs_pos_embedding" in shapes,
        rope_type="split",
        rope_double_precision=True,
        timestep_scale_multiplier=1000,
        cross_attn_timestep_scale_multiplier=1,
        connectors=[connector(shapes, f"{kind}_embeddings_connector") for kind in ("video", "audio")],
    )


def connector(shapes, name):
    """Arguments of LTX2ConnectorTransformer1d."""
    (registers, width), gates = (
        shapes[f"{name}.learnable_registers"],
        shapes.get(f"{name}.transformer_1d_blocks.0.attn1.to_gate_logits.weight"),
    )
    heads = gates[0] if gates else CONNECTOR_HEADS.get(width, SMALL_CONNECTOR_HEADS)
    return dict(
        num_attention_heads=heads,
        attention_head_dim=width // heads,
        num_layers=blocks_of(shapes, f"{name}.transformer_1d_blocks"),
        num_learnable_registers=registers,
        gated_attention=gates is not None,
    )


def pipeline_connectors(told):
    """The same, of the connectors' folder of a diffusers pipeline."""
    return {
        "connectors": [
            dict(
                **{
                    name: told[f"{kind}_connector_{name}"]
                    for name in (
                        "num_attention_heads",
                        "attention_head_dim",
                        "num_layers",
                        "num_learnable_registers",
                    )
                },
                gated_attention=told.get(f"{kind}_gated_attn", False),
                rope_type=told["rope_type"],
                rope_double_precision=told["rope_double_precision"],
            )
            for kind in ("video", "audio")
        ]
    }


def metadata(strings):
    """Lightricks' own configuration."""
    told = json.loads(strings.get("config", "{}")).get("transformer", {})
    found = {
        "rope_type": told.get("rope_type"),
        "cross_attn_timestep_scale_multiplier": told.get("av_ca_timestep_scale_multiplier"),
        "timestep_scale_multiplier": told.get("timestep_scale_multiplier"),
    }
    found["rope_double_precision"] = (
        told["frequencies_precision"] == "float64" if "frequencies_precision" in told else None
    )
    return {name: value for name, value in found.items() if value is not None}


block, cross = "transformer_blocks.{}", "av_cross_attn"
TIMES = {
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "av_ca_video_scale_shift_adaln_single": f"{cross}_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": f"{cross}_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": f"{cross}_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": f"{cross}_audio_v2a_gate",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
}
BESIDE = Beside(
    "connectors",
    pipeline_connectors,
    {
        "caption_projection.connector.": "video_connector.",
        "audio_caption_projection.connector.": "audio_connector.",
    },
)
CONNECTORS = {
    "video_embeddings_connector": "caption_projection.connector",
    "audio_embeddings_connector": "audio_caption_projection.connector",
}
PARTS = (
    "attn1.to_q",
    "attn1.to_k",
    "attn1.to_v",
    "attn1.to_out.0",
    "attn1.to_gate_logits",
    "ff.net.0.proj",
    "ff.net.2",
)
LAYOUT = Layout(
    signature=(
        "patchify_proj.weight",
        "audio_patchify_proj.weight",
        "audio_adaln_single.linear.weight",
        "transformer_blocks.0.audio_to_video_attn.q_norm.weight",
        "audio_embeddings_connector.learnable_registers",
    ),
    absent=(),
    config=config,
    metadata=metadata,
    names={
        "patchify_proj": "proj_in",
        "audio_patchify_proj": "audio_proj_in",
        **{
            f"{theirs}.{leaf}": f"{ours}.{leaf}"
            for theirs, ours in TIMES.items()
            for leaf in ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")
        },
        **{
            f"{block}.{attention}.{theirs}": f"{block}.{attention}.{ours}"
            for attention in (
                "attn1",
                "attn2",
                "audio_attn1",
                "audio_attn2",
                "audio_to_video_attn",
                "video_to_audio_attn",
            )
            for theirs, ours in (("q_norm", "norm_q"), ("k_norm", "norm_k"))
        },
        f"{block}.scale_shift_table_a2v_ca_video": f"{block}.video_a2v_cross_attn_scale_shift_table",
        f"{block}.scale_shift_table_a2v_ca_audio": f"{block}.audio_a2v_cross_attn_scale_shift_table",
        **{
            f"{theirs}.learnable_registers": f"{ours}.learnable_registers"
            for theirs, ours in CONNECTORS.items()
        },
        **{
            f"{theirs}.transformer_1d_blocks.{{}}.{part}": f"{ours}.transformer_blocks.{{}}.{part}"
            for theirs, ours in CONNECTORS.items()
            for part in PARTS
        },
        **{
            f"{theirs}.transformer_1d_blocks.{{}}.attn1.{a}": f"{ours}.transformer_blocks.{{}}.attn1.{b}"
            for theirs, ours in CONNECTORS.items()
            for a, b in (("q_norm", "norm_q"), ("k_norm", "norm_k"))
        },
    },
)
