"""Flux.2 of Black Forest Labs (dev, klein), with reference images: double- and single-stream blocks that
share their modulation; no pooled prompt, latents of 128 channels."""

from dataclasses import replace
from typing import Any

import torch
from diffusers.models.normalization import AdaLayerNormContinuous
from diffusers.models.transformers import transformer_flux2 as theirs

from . import flux
from .blocks import APART, JOINED, BlockAdapter
from .common import adaptive_norms, references
from .common.double_stream import DOUBLE_STREAM, config_of
from .common.fewer_passes import gated, modulated
from .common.joint_blocks import NO_MORE, all_within_range, within_range
from .common.replaced_classes import replace_classes
from .common.request_arguments import distilled_guidance, once
from .common.tensor_plans import COMMON
from .common.timestep_precision import keep_timestep
from .config_values import constant, entries
from .family import BF16_OR_FP16, Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import IN_OUT, NORM_SPELLINGS, Layout, under

#: Ways to place references that Flux.2 knows.
METHODS = (*references.METHODS, references.AT_ZERO)
#: What ComfyUI's method "index" counts references by, on the first axis of positions.
NUMBERS = 10


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. References follow the latent. Positions are (number, y, x, 0), and
    (0, 0, 0, number) for text. diffusers multiplies timestep and guidance by 1000 itself. Where references
    are at timestep 0, timesteps of them follow, and positions end with a mark of their tokens."""
    batch = tokens.shape[0]
    device = tokens.device
    text = cond["c_crossattn"]
    how = references.method(cond, "index", METHODS)
    at_zero = how == references.AT_ZERO and bool(references.references(cond))

    def image_positions():
        image = references.all_positions(grid, cond, how, device)
        spread = image.new_tensor((NUMBERS if how in ("index", references.AT_ZERO) else 1, 1, 1))
        found = torch.nn.functional.pad(image * spread, (0, 1))
        return torch.cat([found, (found[:, :1] > 0).to(found)], dim=1) if at_zero else found

    def text_positions():
        numbers = torch.arange(text.shape[1], device=device)[:, None]
        return torch.nn.functional.pad(numbers, (3, 1 if at_zero else 0))

    timestep = sigma.expand(batch)
    guidance = distilled_guidance(config, cond, batch)
    if at_zero:
        timestep = torch.cat([timestep, torch.zeros_like(timestep)])
        guidance = None if guidance is None else guidance.repeat(2)
    return dict(
        hidden_states=torch.cat([tokens, *references.tokens(grid, cond)], dim=1),
        encoder_hidden_states=text,
        timestep=timestep,
        guidance=guidance,
        img_ids=once(cond, "img_ids", image_positions),
        txt_ids=once(cond, "txt_ids", text_positions),
    )


def config_from_shapes(shapes):
    """Return the arguments of Flux2Transformer2DModel; RoPE has four equal axes."""
    config = config_of(shapes)
    head = config["attention_head_dim"]
    axis = head // 4 // 2 * 2
    return config | dict(
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


class Rotary(theirs.Flux2PosEmbed):
    """diffusers' tables, with the marks of references after the cosines where positions have them: a table
    is what a rank has of its own tokens."""

    def forward(self, ids):
        cosines, sines = super().forward(ids)
        marks = ids[:, len(self.axes_dim) :]
        return torch.cat([cosines, marks.to(cosines)], dim=1) if marks.shape[1] else cosines, sines


def taken_apart(image_rotary_emb):
    """Return the tables of tokens, and which of them are of references."""
    cosines, sines = image_rotary_emb
    return (cosines[:, :-1], sines), cosines[:, -1] > 0


class DoubleBlock(theirs.Flux2TransformerBlock):
    """diffusers' block, whose tokens of references may have a modulation of their own, as in ComfyUI
    (comfy/ldm/flux/layers.py, DoubleStreamBlock, which cuts at an index that a rank's own tokens do not
    have)."""

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb_mod_img,
        temb_mod_txt,
        image_rotary_emb=None,
        joint_attention_kwargs=None,
    ):
        assert not joint_attention_kwargs, NO_MORE
        image = hidden_states
        text = encoder_hidden_states
        if temb_mod_img.shape[0] != 2 * image.shape[0]:
            given = temb_mod_img, temb_mod_txt, image_rotary_emb
            if torch.compiler.is_compiling():
                return all_within_range(*super().forward(image, text, *given))
            return self.in_fewer_passes(image, text, *given)
        tables, of_references = taken_apart(image_rotary_emb)
        of_references = of_references[len(of_references) - image.shape[1] :]  # text is before the image
        part = references.of_tokens(temb_mod_img.unflatten(-1, (6, -1)), of_references)
        (c_shift, c_scale, c_gate), c_mlp = theirs.Flux2Modulation.split(temb_mod_txt[: len(text)], 2)
        attended, c_attended = self.attn(
            hidden_states=(1 + part(1)) * self.norm1(image) + part(0),
            encoder_hidden_states=(1 + c_scale) * self.norm1_context(text) + c_shift,
            image_rotary_emb=tables,
        )
        image = image + part(2) * attended
        image = image + part(5) * self.ff(self.norm2(image) * (1 + part(4)) + part(3))
        text = text + c_gate * c_attended
        text = text + c_mlp[2] * self.ff_context(self.norm2_context(text) * (1 + c_mlp[1]) + c_mlp[0])
        return all_within_range(text, image)

    def in_fewer_passes(self, image, text, image_modulation, text_modulation, tables):
        """Compute the same as diffusers' forward (fewer_passes.py)."""
        (shift, scale, gate), of_image = theirs.Flux2Modulation.split(image_modulation, 2)
        (c_shift, c_scale, c_gate), of_text = theirs.Flux2Modulation.split(text_modulation, 2)
        attended, c_attended = self.attn(
            hidden_states=modulated(self.norm1, image, 1 + scale, shift),
            encoder_hidden_states=modulated(self.norm1_context, text, 1 + c_scale, c_shift),
            image_rotary_emb=tables,
        )
        image = gated(image, attended, gate)
        text = gated(text, c_attended, c_gate)
        shift, scale, gate = of_image
        image = gated(image, self.ff(modulated(self.norm2, image, 1 + scale, shift)), gate)
        shift, scale, gate = of_text
        text = gated(text, self.ff_context(modulated(self.norm2_context, text, 1 + scale, shift)), gate)
        return all_within_range(text, image)


class SingleBlock(theirs.Flux2SingleTransformerBlock):
    """The same of text and image in one stream, as the model gives them."""

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb_mod,
        image_rotary_emb=None,
        joint_attention_kwargs=None,
    ):
        assert not joint_attention_kwargs, NO_MORE
        assert encoder_hidden_states is None, "the model gives text and image in one stream"
        x = hidden_states
        if temb_mod.shape[0] == 2 * x.shape[0]:
            tables, of_references = taken_apart(image_rotary_emb)
            part = references.of_tokens(temb_mod.unflatten(-1, (3, -1)), of_references)
            normed = (1 + part(1)) * self.norm(x) + part(0)
            attended = self.attn(hidden_states=normed, image_rotary_emb=tables)
            return within_range(x + part(2) * attended)
        if torch.compiler.is_compiling():
            made: Any = super().forward(x, None, temb_mod, image_rotary_emb)
            return within_range(made)
        shift, scale, gate = theirs.Flux2Modulation.split(temb_mod, 1)[0]
        normed = modulated(self.norm, x, 1 + scale, shift)
        attended = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb)
        return within_range(gated(x, attended, gate))


class FinalNorm(adaptive_norms.AdaLayerNormContinuous):
    """diffusers' norm, by the timestep of the latent's tokens: references' outputs are read by nobody."""

    def forward(self, x, conditioning_embedding):
        return super().forward(x, conditioning_embedding[: x.shape[0]])


#: diffusers' class -> ours.
REPLACED = {
    theirs.Flux2PosEmbed: Rotary,
    theirs.Flux2TransformerBlock: DoubleBlock,
    theirs.Flux2SingleTransformerBlock: SingleBlock,
    AdaLayerNormContinuous: FinalNorm,
}


def patch_module(transformer, config):
    """Keep timesteps from being rounded, and let references be at timestep 0."""
    embed = transformer.time_guidance_embed
    keep_timestep(transformer, embed, embed.timestep_embedder.linear_1, factor=1000.0)
    replace_classes(transformer, REPLACED)


class TextCountedBefore(BlockAdapter):
    """The model cuts off as many tokens of text as it had before the blocks."""

    def text_after_blocks(self, text, whole):
        return whole(text)


FAMILY = Family(
    name="flux2",
    transformer="Flux2Transformer2DModel",
    latent=Latent(patch=constant(1, 1, 1), frames=False, pixels=constant(1, 16, 16)),
    io=ModelIO(forward_args, takes_tokens=True),
    blocks=replace(
        flux.FAMILY.blocks,
        lists={"transformer_blocks": APART, "single_transformer_blocks": JOINED},
        adapter=TextCountedBefore(),
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "guidance", "ref_latents", "ref_latents_method", "y"),
        widths=entries(c_crossattn="joint_attention_dim"),
        ignored=("y",),
        context_tokens=references.token_count,
        refusal=references.refusal,
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
    cache=Cache(
        prompt_modules=("context_embedder", "pos_embed"),
        step_modules=(
            "time_guidance_embed",
            "double_stream_modulation_img",
            "double_stream_modulation_txt",
            "single_stream_modulation",
            *adaptive_norms.LAST_MODULATION,
        ),
        image_modules=("x_embedder",),
        token_modules=("x_embedder",),
    ),
    layout=LAYOUT,
)
