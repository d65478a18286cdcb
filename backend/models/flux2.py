"""Flux.2 of Black Forest Labs (dev, klein), with reference images: double- and single-stream blocks that
share their modulation; no pooled prompt, latents of 128 channels."""

from dataclasses import replace

import torch

from . import flux
from .blocks import APART, JOINED, BlockAdapter
from .common import references
from .common.double_stream import DOUBLE_STREAM, config_of
from .common.once import once
from .common.tensor_plans import COMMON
from .common.timestep_precision import keep_timestep
from .family import BF16_OR_FP16, Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import IN_OUT, NORM_SPELLINGS, Layout, under

#: What ComfyUI's method "index" counts references by, on the first axis of positions.
NUMBERS = 10


def patch_module(transformer, config):
    """Timesteps are not rounded."""
    embed = transformer.time_guidance_embed
    keep_timestep(transformer, embed, embed.timestep_embedder.linear_1, 1000.0)


def forward_args(config, grid, latent, sigma, cond):
    """References follow the latent. Positions are (number, y, x, 0), and (0, 0, 0, number) for text.
    diffusers multiplies timestep and guidance by 1000 itself."""
    batch = latent.shape[0]
    device = latent.device
    text = cond["c_crossattn"]
    how = references.method(cond, "index")
    placed = how if how in references.PLACES else "offset"

    def image_positions():
        image = references.all_positions(grid, cond, placed, device)
        spread = image.new_tensor((NUMBERS if how == "index" else 1, 1, 1))
        return torch.nn.functional.pad(image * spread, (0, 1))

    def text_positions():
        numbers = torch.arange(text.shape[1], device=device)[:, None]
        return torch.nn.functional.pad(numbers, (3, 0))

    guidance = None
    if config["guidance_embeds"] and "guidance" in cond:
        guidance = cond["guidance"].reshape(-1).expand(batch)
    return dict(
        hidden_states=torch.cat([grid.to_tokens(latent), *references.tokens(grid, cond)], dim=1),
        encoder_hidden_states=text,
        timestep=sigma.expand(batch),
        guidance=guidance,
        img_ids=once(cond, "img_ids", image_positions),
        txt_ids=once(cond, "txt_ids", text_positions),
    )


def refusal(config, grid, cond):
    """diffusers' blocks give one timestep to all tokens."""
    return references.wrong_references(grid, cond, references.OTHER_METHOD)


def config_from_shapes(shapes):
    """Arguments of Flux2Transformer2DModel; RoPE has four equal axes."""
    found = config_of(shapes)
    head = found["attention_head_dim"]
    axis = head // 4 // 2 * 2
    return found | dict(
        timestep_guidance_channels=shapes["time_in.in_layer.weight"][1],
        mlp_ratio=shapes["double_blocks.0.img_mlp.2.weight"][1] / shapes["img_in.weight"][0],
        guidance_embeds="guidance_in.in_layer.weight" in shapes,
        axes_dims_rope=(head - 3 * axis, axis, axis, axis),
    )


DOUBLE = "transformer_blocks.{}"
SINGLE = "single_transformer_blocks.{}"
LAYOUT = Layout(
    signature=(
        "img_in.weight",
        "txt_in.weight",
        "double_stream_modulation_img.lin.weight",
        "single_stream_modulation.lin.weight",
        "double_blocks.0.img_attn.qkv.weight",
        "single_blocks.0.linear1.weight",
    ),
    absent=("vector_in.in_layer.weight",),
    config=config_from_shapes,
    swapped=("norm_out.linear",),
    spellings=NORM_SPELLINGS,
    names={
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        **under("time_in", "time_guidance_embed.timestep_embedder", IN_OUT),
        **under("guidance_in", "time_guidance_embed.guidance_embedder", IN_OUT),
        "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
        "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
        "single_stream_modulation.lin": "single_stream_modulation.linear",
        **DOUBLE_STREAM,
        "double_blocks.{}.img_mlp.0": f"{DOUBLE}.ff.linear_in",
        "double_blocks.{}.img_mlp.2": f"{DOUBLE}.ff.linear_out",
        "double_blocks.{}.txt_mlp.0": f"{DOUBLE}.ff_context.linear_in",
        "double_blocks.{}.txt_mlp.2": f"{DOUBLE}.ff_context.linear_out",
        "single_blocks.{}.linear1": f"{SINGLE}.attn.to_qkv_mlp_proj",
        "single_blocks.{}.linear2": f"{SINGLE}.attn.to_out",
        "single_blocks.{}.norm.query_norm.scale": f"{SINGLE}.attn.norm_q.weight",
        "single_blocks.{}.norm.key_norm.scale": f"{SINGLE}.attn.norm_k.weight",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
    },
)


class TextCountedBefore(BlockAdapter):
    """The model cuts off as many tokens of text as it had before the blocks."""

    def text_after_blocks(self, text, whole):
        return whole(text)


FAMILY = Family(
    name="flux2",
    transformer="Flux2Transformer2DModel",
    latent=Latent(patch=lambda config: (1, 1, 1), frames=False, pixels=lambda config: (1, 16, 16)),
    io=ModelIO(arguments=forward_args, output=lambda output, grid: output[:, : grid.tokens]),
    blocks=replace(
        flux.FAMILY.blocks,
        lists={"transformer_blocks": APART, "single_transformer_blocks": JOINED},
        adapter=TextCountedBefore(),
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "guidance", "ref_latents", "ref_latents_method", "y"),
        widths=lambda config: {"c_crossattn": config["joint_attention_dim"]},
        ignored=("y",),
        context_tokens=references.token_count,
        refusal=refusal,
    ),
    build=Build(dtypes=BF16_OR_FP16, patch_module=patch_module),
    tensor_plan={
        "*.linear_in": "gated colwise",
        "*.linear_out": "rowwise",
        "*.to_qkv_mlp_proj": "packed colwise",
        "single_transformer_blocks.*.to_out": "rowwise after attention",
        "single_transformer_blocks.*.norm_?": None,
        **COMMON,
    },
    cache=Cache(prompt_modules=("context_embedder", "pos_embed"), image_modules=("x_embedder",)),
    layout=LAYOUT,
)
