"""Flux.1 (dev, schnell, Kontext, Fill, Canny, Depth) of Black Forest Labs: 19 double-stream and 38
single-stream blocks in the released size."""

from typing import Any, cast

import torch
from diffusers.models.embeddings import (
    CombinedTimestepGuidanceTextProjEmbeddings,
    CombinedTimestepTextProjEmbeddings,
)

from .blocks import APART, Blocks
from .common import references
from .common.adaptive_norms import LAST_MODULATION
from .common.double_stream import DOUBLE_STREAM, SINGLE_STREAM, config_of
from .common.request_arguments import distilled_guidance, once
from .common.tensor_plans import TEXT_LAYERS
from .common.timestep_precision import keep_timestep
from .config_values import constant, entries
from .family import BF16_OR_FP16, Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import IN_OUT, NORM_SPELLINGS, Layout, rope_axes, under


class Condition(CombinedTimestepGuidanceTextProjEmbeddings):
    """A guidance-distilled model's embedding of timestep, guidance and pooled prompt. Without guidance (Flux
    Disable Guidance) diffusers' forward gives it the two others."""

    def forward(self, timestep, *others):
        if len(others) == 1:
            return CombinedTimestepTextProjEmbeddings.forward(cast(Any, self), timestep, *others)
        return super().forward(timestep, *others)


def patch_module(transformer, config):
    """Keep timesteps from being rounded, and let requests have no guidance."""
    embed = transformer.time_text_embed
    if config["guidance_embeds"]:
        embed.__class__ = Condition
    keep_timestep(transformer, embed, embed.timestep_embedder.linear_1, factor=1000.0)


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. Latents travel packed 2x2, references after; text ids are zeros,
    image ids (number, y, x). diffusers multiplies timestep and guidance by 1000 itself."""
    batch = tokens.shape[0]
    how = references.method(cond, "offset", references.METHODS)
    image = references.with_features(tokens, grid, cond)
    return dict(
        hidden_states=torch.cat([image, *references.tokens(grid, cond)], dim=1),
        encoder_hidden_states=cond["c_crossattn"],
        pooled_projections=cond.get("y"),
        timestep=sigma.expand(batch),
        guidance=distilled_guidance(config, cond, batch),
        img_ids=once(cond, "img_ids", references.all_positions, grid, cond, how, tokens.device),
        txt_ids=once(cond, "txt_ids", tokens.new_zeros, cond["c_crossattn"].shape[1], 3),
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. Fill, Canny and Depth take an image as channels.
    diffusers' blocks give one timestep to all tokens."""
    # by name alone: references() sorts numbers, and references.refusal has not checked them yet
    has_references = any(name.partition(".")[0] == "ref_latents" for name in cond)
    takes_channels = config["in_channels"] != (config["out_channels"] or config["in_channels"])
    if has_references and takes_channels:
        return (
            "it has reference latents, but this model takes its image as channels (Fill, Canny, Depth); "
            "use FLUX.1 Kontext or remove ReferenceLatent."
        )
    wrong = references.refusal(config, grid, cond)
    if wrong:
        return wrong
    if has_references and references.method(cond, "offset") == references.AT_ZERO:
        return (
            f"the references are placed by {references.AT_ZERO}, which this model in diffusers does not "
            "have; choose another method in Edit Model Reference Method."
        )
    return references.wrong_channels(config["in_channels"] // 4, grid, cond)


def config_from_shapes(shapes):
    found = config_of(shapes)
    return found | dict(
        pooled_projection_dim=shapes["vector_in.in_layer.weight"][1],
        guidance_embeds="guidance_in.in_layer.weight" in shapes,
        axes_dims_rope=rope_axes(found["attention_head_dim"]),
    )


EMBEDDERS = (
    under("time_in", "time_text_embed.timestep_embedder", IN_OUT)
    | under("vector_in", "time_text_embed.text_embedder", IN_OUT)
    | under("guidance_in", "time_text_embed.guidance_embedder", IN_OUT)
)
LAYOUT = Layout(
    signature=(
        "img_in.weight",
        "double_blocks.0.img_attn.qkv.weight",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "single_blocks.0.linear1.weight",
        "vector_in.in_layer.weight",
        "txt_in.weight",
    ),
    absent=("distilled_guidance_layer.in_proj.weight",),
    config=config_from_shapes,
    swapped=("norm_out.linear",),
    spellings=NORM_SPELLINGS,
    names={
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        **EMBEDDERS,
        **DOUBLE_STREAM,
        **SINGLE_STREAM,
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
    },
)
FAMILY = Family(
    name="flux",
    transformer="FluxTransformer2DModel",
    latent=Latent(
        channels=lambda config: (config["out_channels"] or config["in_channels"]) // 4,
        patch=constant(1, 2, 2),
        frames=False,
    ),
    io=ModelIO(forward_args, takes_tokens=True),
    blocks=Blocks(
        output_layer="proj_out",
        lists={"transformer_blocks": APART, "single_transformer_blocks": APART},
        returns=("text", "image"),
        text="encoder_hidden_states",
        text_position="first",
        values=(("attn.add_v_proj", "attn.to_v"),),
        per_token={"image_rotary_emb": ("joint", 0)},
        text_layers=TEXT_LAYERS,
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "y", "guidance", "c_concat", "ref_latents", "ref_latents_method"),
        required=("c_crossattn", "y"),
        widths=entries(c_crossattn="joint_attention_dim", y="pooled_projection_dim"),
        context_tokens=references.token_count,
        refusal=refusal,
    ),
    cache=Cache(
        prompt_modules=("context_embedder", "pos_embed"),
        step_modules=("time_text_embed", *LAST_MODULATION),
        image_modules=("x_embedder",),
        token_modules=("x_embedder",),
        modulation=("norm1.linear", "norm1_context.linear", "norm.linear"),
    ),
    build=Build(dtypes=BF16_OR_FP16, patch_module=patch_module),
    tensor_plan=None,
    layout=LAYOUT,
    # Fill, with the latent, its masked image and its mask as channels
    variant=lambda config: {"build.dtypes": (torch.bfloat16,)} if config["in_channels"] == 384 else {},
)
