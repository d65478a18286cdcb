"""Connectors of LTX-2, which finish a prompt before the blocks read it: their modules, their keys in single
files and their folder in a diffusers pipeline."""

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import PixArtAlphaTextProjection
from diffusers.pipelines.ltx2.connectors import LTX2ConnectorTransformer1d
from torch import nn

from ..key_layout import CompanionFolder, blocks_of, under

#: Tokens of a connected prompt, at least.
MIN_TOKENS = 1024
#: Heads of the released connectors, by their width, and of smaller ones.
CONNECTOR_HEADS = {3840: 30, 4096: 32, 2048: 32}
SMALL_CONNECTOR_HEADS = 4


def finish(connector, prompt):
    """Apply the connector to an unfinished prompt (B, tokens, width + 1); return others unchanged."""
    if prompt.shape[2] == connector.inner_dim:
        return prompt
    length = prompt.shape[1]
    registers = connector.num_learnable_registers
    spare = -(-max(MIN_TOKENS, length) // registers) * registers - length
    known = torch.arange(length + spare, device=prompt.device) < length
    mask = torch.where(known, 0.0, -10000.0).to(prompt.dtype).expand(prompt.shape[0], 1, 1, -1)
    return connector(F.pad(prompt[..., :-1], (0, 0, 0, spare)), mask)[0]


class ConnectedProjection(PixArtAlphaTextProjection):
    """LTX-2's projection of a prompt, after its connector."""

    def forward(self, prompt):
        return super().forward(finish(self.connector, prompt))


class ConnectorOnly(nn.Module):
    """The connector alone, in the projection's place: 2.3's prompts have the blocks' width."""

    def forward(self, prompt):
        return finish(self.connector, prompt)


def put_connectors(transformer, config):
    """Put the connectors of ``config`` in front of the projections of the prompt, or in their place."""
    for name, sizes in zip(("caption_projection", "audio_caption_projection"), config.get("connectors", ())):
        if config["use_prompt_embeddings"]:
            getattr(transformer, name).__class__ = ConnectedProjection
        else:
            setattr(transformer, name, ConnectorOnly())
            transformer.register_to_config(use_prompt_embeddings=True)
        getattr(transformer, name).connector = LTX2ConnectorTransformer1d(**{"rope_type": "split", **sizes})


def connector(shapes, name):
    """Return the arguments of LTX2ConnectorTransformer1d."""
    registers, width = shapes[f"{name}.learnable_registers"]
    gates = shapes.get(f"{name}.transformer_1d_blocks.0.attn1.to_gate_logits.weight")
    heads = gates[0] if gates else CONNECTOR_HEADS.get(width, SMALL_CONNECTOR_HEADS)
    return dict(
        num_attention_heads=heads,
        attention_head_dim=width // heads,
        num_layers=blocks_of(shapes, f"{name}.transformer_1d_blocks"),
        num_learnable_registers=registers,
        gated_attention=gates is not None,
    )


def pipeline_connectors(config):
    """Return ``connectors``, the arguments of both, from the configuration of a pipeline's folder of them."""

    def arguments(kind):
        sizes = ("num_attention_heads", "attention_head_dim", "num_layers", "num_learnable_registers")
        return dict(
            **{name: config[f"{kind}_connector_{name}"] for name in sizes},
            gated_attention=config.get(f"{kind}_gated_attn", False),
            rope_type=config["rope_type"],
            rope_double_precision=config["rope_double_precision"],
        )

    return {"connectors": [arguments("video"), arguments("audio")]}


COMPANION = CompanionFolder(
    "connectors",
    pipeline_connectors,
    {
        "caption_projection.connector.": "video_connector.",
        "audio_caption_projection.connector.": "audio_connector.",
    },
)
CONNECTOR = {
    "learnable_registers": "learnable_registers",
    **under(
        "transformer_1d_blocks.{}",
        "transformer_blocks.{}",
        {
            **{f"attn1.{name}": f"attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")},
            "attn1.to_gate_logits": "attn1.to_gate_logits",
            "attn1.q_norm": "attn1.norm_q",
            "attn1.k_norm": "attn1.norm_k",
            "ff.net.0.proj": "ff.net.0.proj",
            "ff.net.2": "ff.net.2",
        },
    ),
}
CONNECTOR_NAMES = {
    **under("video_embeddings_connector", "caption_projection.connector", CONNECTOR),
    **under("audio_embeddings_connector", "audio_caption_projection.connector", CONNECTOR),
}
