"""Chroma of Lodestone Rock: Flux.1 with one small network that makes every modulation; no pooled prompt,
guidance by a negative prompt."""

from .calls.chroma import adjust, forward_args, prepare, refusal
from .layouts.chroma import LAYOUT
from .plans import COMMON, PARALLEL_MLP, TEXT_LAYERS
from .spec import Family

FAMILY = Family(
    name="chroma",
    transformer="ChromaTransformer2DModel",
    prediction="flow",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    joined=("single_transformer_blocks",),
    text="encoder_hidden_states",
    text_position="first",
    returns=("text", "image"),
    per_token={"image_rotary_emb": ("joint", 0)},
    text_layers=TEXT_LAYERS,
    patch=lambda config: (1, 2, 2),
    latent_channels=lambda config: config["in_channels"] // 4,
    frames=False,
    conditioning=("c_crossattn", "guidance", "y"),
    ignored=("y",),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["joint_attention_dim"]},
    adjust=adjust,
    prepare=prepare,
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output,
    layout=LAYOUT,
    tp_plan=COMMON | PARALLEL_MLP,
)
