"""Chroma of Lodestone Rock: Flux.1 with one small network that makes every modulation; no pooled prompt, guidance by a negative prompt."""

import torch
from diffusers.models.embeddings import get_timestep_embedding

from ..loading.layout import Layout, blocks_of
from . import flux
from .plans import COMMON, PARALLEL_MLP
from .spec import Family


#: Rows of ComfyUI's modulation table, those of the released size; the last two are the final layer's in any size.
MODULATIONS = 344


def prepare(transformer, grid):
    """diffusers makes the table as long as the model needs."""
    embed = transformer.time_text_embed
    embed.mod_proj = get_timestep_embedding(torch.arange(MODULATIONS) * 1000, embed.mod_proj.shape[1], flip_sin_to_cos=True, downscale_freq_shift=0).to(embed.mod_proj.device)


def forward_args(config, grid, latent, sigma, cond):
    """Flux's arguments without pooled prompt and guidance."""
    arguments = flux.forward_args({"guidance_embeds": False}, grid, latent, sigma, {**cond, "y": None})
    return {name: value for name, value in arguments.items() if name not in ("pooled_projections", "guidance")}


def refusal(config, grid, cond):
    """diffusers fixes Chroma's guidance embedding at ComfyUI's default."""
    return "guidance is not 0, which Chroma does not have in diffusers; remove FluxGuidance." if "guidance" in cond and cond["guidance"].any() else None


def config(shapes):
    """Arguments of ChromaTransformer2DModel; RoPE axes are (16, 56, 56)/128 of the head size."""
    hidden, head = shapes["img_in.weight"][0], shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    axis, network = 56 * head // 128 // 2 * 2, "distilled_guidance_layer"
    return dict(
        in_channels=shapes["img_in.weight"][1], out_channels=shapes["final_layer.linear.weight"][0], num_layers=blocks_of(shapes, "double_blocks"), num_single_layers=blocks_of(shapes, "single_blocks"),
        attention_head_dim=head, num_attention_heads=hidden // head, joint_attention_dim=shapes["txt_in.weight"][1], axes_dims_rope=(head - 2 * axis, axis, axis),
        approximator_num_channels=shapes[f"{network}.in_proj.weight"][1], approximator_hidden_dim=shapes[f"{network}.in_proj.weight"][0], approximator_layers=blocks_of(shapes, f"{network}.layers"))


network = "distilled_guidance_layer"
LAYOUT = Layout(
    signature=("img_in.weight", "txt_in.weight", f"{network}.in_proj.weight", f"{network}.norms.0.scale", "double_blocks.0.img_attn.norm.query_norm.scale", "single_blocks.0.linear1.weight", "final_layer.linear.weight"),
    absent=(),
    variants={key: "Chroma Radiance, which works on pixels" for key in ("img_in_patch.weight", "nerf_final_layer.norm.scale", "nerf_final_layer_conv.norm.scale", "__x0__")},
    config=config,
    names=flux.LAYOUT.names | {
        f"{network}.layers.{{}}.in_layer": f"{network}.layers.{{}}.linear_1", f"{network}.layers.{{}}.out_layer": f"{network}.layers.{{}}.linear_2",
        f"{network}.norms.{{}}.scale": f"{network}.norms.{{}}.weight",
    },
)

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
    patch=lambda config: (1, 2, 2),
    latent_channels=lambda config: config["in_channels"] // 4,
    conditioning=("c_crossattn", "guidance", "y"),         # ComfyUI sends a pooled prompt where there is one, the model has no use for it
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["joint_attention_dim"]},
    prepare=prepare,
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output,
    layout=LAYOUT,
    tp_plan=COMMON | PARALLEL_MLP,
)
