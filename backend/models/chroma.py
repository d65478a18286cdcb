"""Chroma of Lodestone Rock: Flux.1 with one small network that makes every modulation; no pooled prompt,
guidance by a negative prompt."""

from dataclasses import replace
from typing import Any

import torch
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.transformers.transformer_chroma import (
    ChromaCombinedTimestepTextProjEmbeddings as Embedder,
)

from . import flux
from .blocks import APART, JOINED
from .common.call_state import call_state
from .common.double_stream import config_of
from .common.tensor_plans import COMMON, PARALLEL_MLP
from .common.timestep_precision import keep_timestep
from .config_values import constant, entries
from .family import BF16_OR_FP16, Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import IN_OUT, NORM_SPELLINGS, Layout, blocks_of, rope_axes, under

#: Rows of ComfyUI's modulation table, in any size: those of the released one.
MODULATIONS = 344


def patch_module(transformer, config):
    """Keep timesteps from being rounded, and embed the request's guidance; diffusers' own is always 0."""
    reader = transformer.distilled_guidance_layer.in_proj
    embed = transformer.time_text_embed
    keep_timestep(transformer, embed, reader, factor=1000.0)

    call = call_state(transformer, {"guidance": None})
    embed.guidance_proj.register_forward_pre_hook(lambda module, args: (call.guidance,))


def prepare(transformer, grid):
    """Make the table that tells modulations apart 344 rows long in every size, as ComfyUI does. diffusers
    makes it as long as the model needs."""
    # behind a cached layer, where there is one
    embed: Any = next(each for each in transformer.modules() if isinstance(each, Embedder))
    width = embed.mod_proj.shape[1]
    numbers = torch.arange(MODULATIONS) * 1000
    table = get_timestep_embedding(numbers, width, flip_sin_to_cos=True, downscale_freq_shift=0)
    embed.mod_proj = table.to(embed.mod_proj.device)


def forward_args(config, grid, tokens, sigma, cond):
    """Return Flux's arguments without pooled prompt. Guidance, 0 by default, runs to 1000 as timesteps do."""
    arguments = flux.forward_args({"guidance_embeds": True}, grid, tokens, sigma, cond)
    del arguments["pooled_projections"]
    guidance = arguments["guidance"]
    zeros = tokens.new_zeros(tokens.shape[0])
    return arguments | {"guidance": zeros if guidance is None else guidance * 1000}


def config_from_shapes(shapes):
    found = config_of(shapes)
    return found | dict(
        axes_dims_rope=rope_axes(found["attention_head_dim"]),
        approximator_num_channels=shapes[f"{GUIDANCE}.in_proj.weight"][1],
        approximator_hidden_dim=shapes[f"{GUIDANCE}.in_proj.weight"][0],
        approximator_layers=blocks_of(shapes, f"{GUIDANCE}.layers"),
    )


GUIDANCE = "distilled_guidance_layer"
#: Layers of the released network that makes the modulation.
GUIDANCE_LAYERS = 5
LAYOUT = Layout(
    signature=(
        "img_in.weight",
        "txt_in.weight",
        f"{GUIDANCE}.in_proj.weight",
        f"{GUIDANCE}.norms.0.scale",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "single_blocks.0.linear1.weight",
        "final_layer.linear.weight",
    ),
    config=config_from_shapes,
    spellings=(
        *NORM_SPELLINGS,
        *((f"{GUIDANCE}.norms.{i}.weight", f"{GUIDANCE}.norms.{i}.scale") for i in range(GUIDANCE_LAYERS)),
    ),
    names={
        **flux.LAYOUT.names,
        **under(f"{GUIDANCE}.layers.{{}}", f"{GUIDANCE}.layers.{{}}", IN_OUT),
        f"{GUIDANCE}.norms.{{}}.scale": f"{GUIDANCE}.norms.{{}}.weight",
    },
)
FAMILY = Family(
    name="chroma",
    transformer="ChromaTransformer2DModel",
    latent=Latent(channels=lambda config: config["in_channels"] // 4, patch=constant(1, 2, 2), frames=False),
    io=ModelIO(forward_args, takes_tokens=True, prepare=prepare),
    blocks=replace(
        flux.FAMILY.blocks, lists={"transformer_blocks": APART, "single_transformer_blocks": JOINED}
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "guidance", "y"),
        widths=entries(c_crossattn="joint_attention_dim"),
        ignored=("y",),
    ),
    build=Build(dtypes=BF16_OR_FP16, patch_module=patch_module),
    tensor_plan=COMMON | PARALLEL_MLP,
    cache=Cache(
        prompt_modules=("context_embedder", "pos_embed"),
        step_modules=("time_text_embed", "distilled_guidance_layer"),
        image_modules=("x_embedder",),
        token_modules=("x_embedder",),
    ),
    layout=LAYOUT,
)
