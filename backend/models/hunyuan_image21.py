"""HunyuanImage 2.1 of Tencent, text to image: HunyuanVideo's blocks over an image (20 double-stream and 40
single-stream in the released size); two kinds of text (Qwen, byT5) are joined inside the model."""

from types import SimpleNamespace
from typing import Any, cast

import torch.nn.functional as F
from diffusers.models.transformers import transformer_hunyuanimage as theirs

from . import hunyuan_video
from .blocks import BlockAdapter
from .common.adaptive_norms import LAST_MODULATION
from .common.double_stream import DOUBLE_APART, SINGLE_APART, SINGLE_STREAM
from .common.request_arguments import distilled_guidance, once
from .common.text_order import TextOrder
from .common.timestep_precision import round_input
from .config_values import constant, entries
from .family import STEP_END, Build, Conditioning, ModelIO, Noise
from .key_layout import IN_OUT, Layout, blocks_of, under


class Condition(theirs.HunyuanImageCombinedTimeGuidanceEmbedding):
    """The embedding of timesteps and guidance, also of a distilled model's without guidance."""

    def forward(self, timestep, timestep_r=None, guidance=None):
        if guidance is not None:
            return super().forward(timestep, timestep_r, guidance)
        names = ("time_proj", "timestep_embedder", "time_proj_r", "timestep_embedder_r")
        unguided = SimpleNamespace(guidance_embedder=None, **{name: getattr(self, name) for name in names})
        own = theirs.HunyuanImageCombinedTimeGuidanceEmbedding.forward
        return own(cast(Any, unguided), timestep, timestep_r)


class OrderedText(theirs.HunyuanImageTransformer2DModel):
    """diffusers' model, with an ``order`` of the text that is made once a request: its own forward asks the
    device at each call which tokens masks hide. Returns tokens."""

    # its own arguments, which the family's file alone passes
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states,
        timestep,
        encoder_hidden_states,
        encoder_attention_mask,
        order,
        attention_mask=None,
        encoder_hidden_states_2=None,
        timestep_r=None,
        guidance=None,
        return_dict=True,
    ):
        rotary = self.rope(hidden_states)
        temb = self.time_guidance_embed(timestep, guidance=guidance, timestep_r=timestep_r)
        image = self.x_embedder(hidden_states)
        text = self.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask)
        if encoder_hidden_states_2 is not None and self.context_embedder_2 is not None:
            text = order.joined(self.context_embedder_2(encoder_hidden_states_2), text)
        block_arguments = dict(attention_mask=attention_mask, image_rotary_emb=rotary)
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            image, text = block(image, text, temb, **block_arguments)
        return (self.proj_out(self.norm_out(image, temb)),)


def patch_module(transformer, config):
    """Order the text once a request; round the sines of timesteps and guidance to the dtype of their layer,
    which diffusers leaves in float32. Requests may have no guidance."""
    transformer.__class__ = OrderedText
    embedders = transformer.time_guidance_embed
    embedders.__class__ = Condition
    for embedder in (embedders.timestep_embedder, embedders.timestep_embedder_r, embedders.guidance_embedder):
        if embedder is not None:
            round_input(embedder.linear_1)


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward. Timesteps and guidance run to 1000. A prompt without quoted words
    has no text of byT5."""
    batch = latent.shape[0]
    text = cond["c_crossattn"]
    glyphs = cond.get("txt_byt5")
    guidance = distilled_guidance(config, cond, batch)
    mask = once(cond, "mask", lambda: cond.get("attention_mask", hunyuan_video.all_tokens(text)).bool())
    order = once(cond, "order", text_order, mask, glyphs)
    return dict(
        hidden_states=grid.pad(latent),
        timestep=sigma.expand(batch) * 1000,
        timestep_r=cond[STEP_END].expand(batch) * 1000 if STEP_END in cond else None,
        guidance=None if guidance is None else guidance * 1000,
        encoder_hidden_states=text,
        encoder_attention_mask=mask,
        encoder_hidden_states_2=glyphs,
        order=order,
        attention_mask=once(cond, "key mask", key_mask, order.mask, grid),
    )


def text_order(mask, glyphs):
    """Return the order of byT5's tokens and of Qwen's. Attention reads all of byT5's, which have no mask, and
    of Qwen's those in ``mask``."""
    texts = [] if glyphs is None else [hunyuan_video.all_tokens(glyphs)]
    return TextOrder([*texts, mask], hides=not bool(mask.all()))


def key_mask(text_mask, grid):
    """Return a mask (B, 1, 1, image + text) of what attention reads, of the text's (B, text tokens); None
    where that is everything."""
    return None if text_mask is None else F.pad(text_mask, (grid.tokens, 0), value=True)[:, None, None]


def count_text_tokens(cond):
    """Count the tokens of both kinds of text."""
    return sum(cond[name].shape[1] for name in ("c_crossattn", "txt_byt5") if name in cond)


def config_from_shapes(shapes):
    """Return the arguments of HunyuanImageTransformer2DModel; RoPE has two equal axes."""
    config = hunyuan_video.shared_config(shapes)
    axis = config["attention_head_dim"] // 2
    return config | dict(
        patch_size=tuple(shapes["img_in.proj.weight"][2:]),
        num_single_layers=blocks_of(shapes, "single_blocks"),
        text_embed_2_dim=shapes["byt5_in.fc1.weight"][1],
        rope_axes_dim=(axis, axis),
        guidance_embeds="guidance_in.in_layer.weight" in shapes,
        use_meanflow="time_r_in.in_layer.weight" in shapes,
    )


LAYOUT = Layout(
    signature=(
        "img_in.proj.weight",
        "txt_in.individual_token_refiner.blocks.0.norm1.weight",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "single_blocks.0.linear2.weight",
        "byt5_in.fc1.weight",
        "final_layer.linear.weight",
    ),
    absent=("vector_in.in_layer.weight", "cond_type_embedding.weight"),  # HunyuanVideo, and its 1.5
    config=config_from_shapes,
    swapped=("norm_out.linear",),
    spellings=(*hunyuan_video.SPELLINGS, (".linear2.fc.", ".linear2.")),
    apart=DOUBLE_APART | SINGLE_APART,
    names={
        **hunyuan_video.NAMES,
        **SINGLE_STREAM,
        **under("time_in", "time_guidance_embed.timestep_embedder", IN_OUT),
        **under("time_r_in", "time_guidance_embed.timestep_embedder_r", IN_OUT),
        **under("guidance_in", "time_guidance_embed.guidance_embedder", IN_OUT),
        "byt5_in.layernorm": "context_embedder_2.norm",
        **{f"byt5_in.fc{i}": f"context_embedder_2.linear_{i}" for i in (1, 2, 3)},
    },
)
ONLY = {"patch_size": ((1, 1), "the refiner of HunyuanImage 2.1, which is given an image,")}
ACCEPTED = ("c_crossattn", "txt_byt5", "attention_mask", "guidance")


def variant(config):
    """Return what a configuration changes of the family. The distilled model is told where a step ends
    (MeanFlow), and reads guidance."""
    changes = {}
    if config["use_meanflow"]:
        changes["conditioning.accepted"] = (*ACCEPTED, STEP_END)
    if config["guidance_embeds"]:
        changes["conditioning.ignored"] = ()
    return changes


FAMILY = hunyuan_video.FAMILY.changed(
    {
        "name": "hunyuan-image-2.1",
        "transformer": "HunyuanImageTransformer2DModel",
        "latent.frames": False,
        "latent.pixels": constant(1, 32, 32),
        "noise": Noise(),
        "io": ModelIO(arguments=forward_args),
        "blocks.per_token": {"image_rotary_emb": ("image", 0)},
        "blocks.adapter": BlockAdapter(),
        "conditioning": Conditioning(
            accepted=ACCEPTED,
            widths=entries(c_crossattn="text_embed_dim", txt_byt5="text_embed_2_dim"),
            ignored=("guidance",),
            count_text_tokens=count_text_tokens,
        ),
        "cache.prompt_modules": ("rope", "context_embedder_2"),
        "cache.step_modules": ("time_guidance_embed", "context_embedder", *LAST_MODULATION),
        "build": Build(patch_module=patch_module, only=ONLY),
        "layout": LAYOUT,
        "variant": variant,
    }
)
