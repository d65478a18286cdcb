"""HunyuanVideo 1.5 of Tencent, with its super resolution: 54 double-stream blocks; three kinds of text (image
features, byT5, Qwen) are joined inside the model."""

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15Transformer3DModel
from torch import Tensor

from . import hunyuan_video
from .blocks import APART, BlockAdapter
from .common import references
from .common.adaptive_norms import LAST_MODULATION
from .common.double_stream import DOUBLE_APART
from .common.request_arguments import once
from .common.tensor_plans import COMMON
from .common.text_order import TextOrder
from .common.timestep_precision import round_input
from .config_values import constant, entries
from .family import FP16_OR_BF16, STEP_END, Build, Conditioning, ModelIO
from .hunyuan_video import NAMES, SPELLINGS, all_tokens, video_config
from .key_layout import IN_OUT, Layout, under


class KeyMask(HunyuanVideoAttnProcessor2_0):
    """HunyuanVideo's attention with the text mask (B, text) as one over keys; 1.5's own makes a mask of
    tokens x tokens, gigabytes for a video."""

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
    ):
        mask = None
        if attention_mask is not None:
            mask = F.pad(attention_mask, (hidden_states.shape[1], 0), value=True)[:, None, None]
        return super().__call__(attn, hidden_states, encoder_hidden_states, mask, image_rotary_emb)


class OrderedText(HunyuanVideo15Transformer3DModel):
    """diffusers' model, with what masks and image decide made once a request (Prompt): its own forward asks
    the device at each call which tokens are hidden, and whether there is an image. Returns tokens."""

    # its own arguments, which the family's file alone passes
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states,
        timestep,
        encoder_hidden_states,
        encoder_attention_mask,
        encoder_hidden_states_2,
        image_embeds,
        prompt,
        timestep_r=None,
        return_dict=True,
    ):
        rotary = self.rope(hidden_states)
        temb = self.time_embed(timestep, timestep_r=timestep_r)
        image = self.x_embedder(hidden_states)
        words = self.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask)
        glyphs = self.context_embedder_2(encoder_hidden_states_2)
        features = self.image_embedder(image_embeds)
        if prompt.is_without_image:
            features = features * 0.0
        kinds = self.cond_type_embed(torch.arange(3, device=words.device))
        words = words + kinds[0]
        if prompt.hidden_words is not None:
            words = words.masked_fill(prompt.hidden_words, 0.0)
        text = prompt.order.joined(features + kinds[2], glyphs + kinds[1], words)
        for block in self.transformer_blocks:
            image, text = block(image, text, temb, prompt.order.mask, rotary)
        return (self.proj_out(self.norm_out(image, temb)),)


def clip_text(block, arguments, outputs):
    """Keep a block's text within float16, as ComfyUI does; a forward hook."""
    image, text = outputs
    return image, torch.nan_to_num(text) if text.dtype == torch.float16 else text


def patch_module(transformer, config):
    """Patch the transformer: an order of the text that is made once a request, the cheaper mask for every
    block, its text clipped; sines of the timestep, made in float32, in their layer's dtype."""
    round_input(transformer.time_embed.timestep_embedder.linear_1)
    if config["use_meanflow"]:
        round_input(transformer.time_embed.timestep_embedder_r.linear_1)
    transformer.__class__ = OrderedText
    for block in transformer.transformer_blocks:
        block.attn.set_processor(KeyMask())
        block.register_forward_hook(clip_text)


class Prompt:
    """What masks and image of a prompt decide, made once a request. No tuple: FSDP2 makes new ones of those.

    order: image, glyphs and words as they follow each other. hidden_words: (B, words, 1), true for those that
    attention leaves out, or None. is_without_image: an image's features are given, and all zero.
    """

    def __init__(self, words: Tensor, glyphs: Tensor, image: Tensor):
        """``words``: their mask (B, tokens). ``glyphs``, ``image``: their features (B, tokens, width)."""
        self.is_without_image = image.shape[1] > 0 and not bool(image.any())
        self.hidden_words = None if bool(words.all()) else ~words.bool()[..., None]
        features = torch.zeros_like(all_tokens(image)) if self.is_without_image else all_tokens(image)
        hides = self.is_without_image or self.hidden_words is not None
        self.order = TextOrder([features, all_tokens(glyphs), words], hides)


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward. Timesteps run to 1000, that of the step's end too. c_concat:
    further channels, the image's latent and mask (super resolution: the enlarged video's too), or zeros."""
    batch = latent.shape[0]
    text = cond["c_crossattn"]
    channels = config["in_channels"] - latent.shape[1]
    image = cond.get("c_concat", latent.new_zeros(batch, channels, *latent.shape[2:]))
    mask = once(cond, "mask", lambda: cond.get("attention_mask", all_tokens(text)))
    glyphs = once(cond, "glyphs", given, cond, "txt_byt5", config["text_embed_2_dim"])
    features = once(cond, "features", given, cond, "clip_fea", config["image_embed_dim"])
    return dict(
        hidden_states=grid.pad(torch.cat([latent, image], dim=1)),
        timestep=sigma.expand(batch) * 1000,
        timestep_r=cond[STEP_END].expand(batch) * 1000 if STEP_END in cond else None,
        encoder_hidden_states=text,
        encoder_attention_mask=mask,
        encoder_hidden_states_2=glyphs,
        image_embeds=features,
        prompt=once(cond, "prompt", Prompt, mask, glyphs, features),
    )


def given(cond, name, width):
    """Return the argument ``name`` (B, tokens, width), without tokens where the request has none."""
    text = cond["c_crossattn"]
    return cond.get(name, text.new_zeros(text.shape[0], 0, width))


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. Text to video may leave c_concat out."""
    return references.wrong_channels(config["in_channels"], grid, cond) if "c_concat" in cond else None


def config_from_shapes(shapes):
    return video_config(shapes) | dict(
        text_embed_2_dim=shapes["byt5_in.fc1.weight"][1],
        image_embed_dim=shapes["vision_in.proj.0.weight"][0],
        use_meanflow="time_r_in.in_layer.weight" in shapes,
    )


#: Embeddings that Capybara's own class has besides.
OF_CAPYBARA = ("cond_special_token_embedding", "siglip_type_embedding", "task_bias")
LAYOUT = Layout(
    signature=(
        "img_in.proj.weight",
        "txt_in.individual_token_refiner.blocks.0.norm1.weight",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "byt5_in.fc1.weight",
        "vision_in.proj.0.weight",
        "cond_type_embedding.weight",
    ),
    absent=("vector_in.in_layer.weight",),  # HunyuanVideo
    unread={f"{name}.weight": "of Capybara, which ComfyUI runs without" for name in OF_CAPYBARA},
    config=config_from_shapes,
    swapped=("norm_out.linear",),
    spellings=SPELLINGS,
    apart=DOUBLE_APART,
    names={
        **NAMES,
        **under("time_in", "time_embed.timestep_embedder", IN_OUT),
        **under("time_r_in", "time_embed.timestep_embedder_r", IN_OUT),
        "cond_type_embedding.weight": "cond_type_embed.weight",
        "byt5_in.layernorm": "context_embedder_2.norm",
        **{f"byt5_in.fc{i}": f"context_embedder_2.linear_{i}" for i in (1, 2, 3)},
        "vision_in.proj.0": "image_embedder.norm_in",
        "vision_in.proj.1": "image_embedder.linear_1",
        "vision_in.proj.3": "image_embedder.linear_2",
        "vision_in.proj.4": "image_embedder.norm_out",
    },
)
ACCEPTED = ("c_crossattn", "attention_mask", "txt_byt5", "clip_fea", "c_concat", "guidance", "y")
FAMILY = hunyuan_video.FAMILY.changed(
    {
        "name": "hunyuan-video-1.5",
        "transformer": "HunyuanVideo15Transformer3DModel",
        "latent.pixels": constant(4, 16, 16),
        "io": ModelIO(arguments=forward_args),
        "blocks.lists": {"transformer_blocks": APART},
        "blocks.per_token": {"freqs_cis": ("image", 0)},
        "blocks.text_mask": "attention_mask",
        "blocks.adapter": BlockAdapter(),
        "conditioning": Conditioning(
            accepted=ACCEPTED,
            widths=entries(
                c_crossattn="text_embed_dim", txt_byt5="text_embed_2_dim", clip_fea="image_embed_dim"
            ),
            ignored=("guidance", "y"),
            refusal=refusal,
        ),
        "cache.prompt_modules": ("rope", "context_embedder_2", "image_embedder"),
        "cache.step_modules": ("time_embed", "context_embedder", *LAST_MODULATION),
        "cache.modulation": ("norm1.linear", "norm1_context.linear"),
        "build": Build(dtypes=FP16_OR_BF16, patch_module=patch_module),
        "tensor_plan": COMMON,
        "layout": LAYOUT,
        "variant": lambda config: (
            {"conditioning.accepted": (*ACCEPTED, STEP_END)} if config["use_meanflow"] else {}
        ),
    }
)
