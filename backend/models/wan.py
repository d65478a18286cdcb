"""Wan 2.1 and 2.2 of Alibaba, text, image or first and last frame to video, both experts of A14B, 5B, Fun
Control and Camera, Phantom, Bernini: 30 to 40 blocks; the prompt and the image's CLIP features are read
through cross-attention."""

import re
from functools import partial
from operator import itemgetter
from typing import Any

import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from ..errors import UnsupportedError, quoted
from .blocks import APART, Blocks
from .common import references, wan_inputs
from .common.call_state import OwnTokens
from .common.header_config import transformer_config
from .common.request_arguments import once
from .common.token_levels import levels_of_frames, share_levels
from .common.wan_blocks import SelfAttention, WanBlock, WanEmbedder
from .config_values import entries
from .family import FP16_OR_BF16, Build, Cache, Conditioning, Family, Latent, ModelIO, prompt_tokens
from .key_layout import LAYERS, Layout, blocks_of, under

#: Tokens of CLIP's features of an image.
CLIP_TOKENS = 257
#: Tokens along a side of the video, at most, where the configuration does not tell.
MAX_SIDE_TOKENS = 1024


class ImageFirst(WanAttnProcessor):
    """Attention to image features (``image_tokens``) and to text of any length, not 512 tokens.

    Without features (None) the prompt is read in their place too, as in ComfyUI.
    """

    image_tokens: int | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states,
        encoder_hidden_states: Any = None,
        attention_mask=None,
        rotary_emb=None,
    ):
        image = encoder_hidden_states[:, : self.image_tokens]
        text = encoder_hidden_states[:, self.image_tokens or 0 :]

        def apart(x):
            return x.unflatten(2, (attn.heads, -1)).transpose(1, 2)

        query = apart(attn.norm_q(attn.to_q(hidden_states)))
        pairs = [
            (attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image)),
            (attn.norm_k(attn.to_k(text)), attn.to_v(text)),
        ]
        read = [F.scaled_dot_product_attention(query, apart(key), apart(value)) for key, value in pairs]
        return attn.to_out[1](attn.to_out[0]((read[0] + read[1]).transpose(1, 2).flatten(2)))


def embed_image(embedder, processor, features):
    """Embed CLIP features (B, tokens, D) as the blocks read them. Some models have learned positions, of
    which ComfyUI uses as many as there are tokens."""
    if embedder.pos_embed is not None:
        features = features[:, : embedder.pos_embed.shape[1]] + embedder.pos_embed[:, : features.shape[1]]
    processor.image_tokens = features.shape[1]
    return embedder.norm2(embedder.ff(embedder.norm1(features)))


def has_frame_timesteps(config):
    """Return whether frames may have timesteps of their own: 2.2's 5B, whose VAE makes 48 channels."""
    return config["out_channels"] == 48


def patch_module(transformer, config):
    """Patch the transformer: image features, or none, text of any length, timesteps of frames, and the inputs
    of variants."""
    wan_inputs.patch_module(transformer, config)
    for block in transformer.blocks:
        block.__class__ = WanBlock
        block.attn1.set_processor(SelfAttention())
    if has_frame_timesteps(config):
        transformer.condition_embedder.__class__ = WanEmbedder
        share_levels(transformer, [transformer.condition_embedder, *transformer.blocks])
    embedder = transformer.condition_embedder.image_embedder
    processor = ImageFirst()

    def forget(module, args):
        processor.image_tokens = None

    if embedder is not None:
        transformer.condition_embedder.register_forward_pre_hook(forget)
        embedder.forward = partial(embed_image, embedder, processor)
        for block in transformer.blocks:
            block.attn2.set_processor(processor)


def image_features(config, cond):
    """Count the tokens of image features that cross-attention reads: CLIP's, of which learned positions may
    leave some out, or without them the prompt a second time (ImageFirst)."""
    if not config["image_dim"]:
        return 0
    positions = config.get("pos_embed_seq_len")
    if cond is None:
        return positions or CLIP_TOKENS
    if "clip_fea" not in cond:
        return prompt_tokens(cond)
    tokens = cond["clip_fea"].shape[1]
    return min(tokens, positions or tokens)


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward. The image's latent and mask are further channels (c_concat), its
    CLIP features clip_fea. 2.2's 5B has a timestep for each frame: the part of it that the mask has
    denoised."""
    timestep = sigma.expand(latent.shape[0]) * 1000
    levels = {}
    if "denoise_mask" in cond:
        timestep = cond["denoise_mask"].float().mean(dim=(1, 3, 4)) * timestep[:, None]
        make = partial(levels_of_frames, timestep, grid.counts[1] * grid.counts[2])
        levels["level_of_token"] = once(cond, "level of token", make)
    return dict(
        hidden_states=grid.pad(references.with_channels(latent, cond)),
        encoder_hidden_states=cond["c_crossattn"],
        encoder_hidden_states_image=cond.get("clip_fea") if config["image_dim"] else None,
        timestep=timestep,
        further=wan_inputs.padded(config, grid, cond),
        **levels,
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. 2.1's image to video models may read CLIP features. The
    position table ends."""
    most = config.get("rope_max_seq_len", MAX_SIDE_TOKENS)
    if max(grid.counts) > most:
        counts = " x ".join(map(str, grid.counts))
        return f"the latent is {counts} tokens, but this model knows {most} a side; make it smaller."
    if config["image_dim"] and "clip_fea" in cond and cond["clip_fea"].shape[-1] != config["image_dim"]:
        return (
            f"clip_fea has width {cond['clip_fea'].shape[-1]}, but this model reads "
            f"{config['image_dim']}; use the CLIP Vision model of Wan (CLIP-ViT-H)."
        )
    wrong = references.wrong_channels(config["in_channels"], grid, cond)
    return wrong or wan_inputs.refusal(config, grid, cond)


def config_from_shapes(shapes):
    """Return the arguments of WanTransformer3DModel; heads are 128 wide."""
    embedding = shapes["patch_embedding.weight"]
    if len(embedding) != 5:
        raise UnsupportedError(
            f"patch_embedding.weight has {len(embedding)} dimensions, {tuple(embedding)}, and Wan's has 5; "
            f"the file was made by a tool that writes 4 at most: use a GGUF that ComfyUI-GGUF's tools made."
        )
    image = "img_emb.proj.1.weight" in shapes
    return dict(
        patch_size=embedding[2:],
        num_attention_heads=embedding[0] // 128,
        attention_head_dim=128,
        in_channels=embedding[1],
        out_channels=shapes["head.head.weight"][0] // (embedding[2] * embedding[3] * embedding[4]),
        text_dim=shapes["text_embedding.0.weight"][1],
        freq_dim=shapes["time_embedding.0.weight"][1],
        ffn_dim=shapes["blocks.0.ffn.0.weight"][0],
        num_layers=blocks_of(shapes, "blocks"),
        cross_attn_norm="blocks.0.norm3.weight" in shapes,
        qk_norm="rms_norm_across_heads" if "blocks.0.self_attn.norm_q.weight" in shapes else None,
        image_dim=shapes["img_emb.proj.1.weight"][1] if image else None,
        added_kv_proj_dim=embedding[0] if image else None,
        pos_embed_seq_len=shapes["img_emb.emb_pos"][1] if "img_emb.emb_pos" in shapes else None,
        reference_channels=shapes.get("ref_conv.weight", (None, None))[1],
        camera_channels=shapes.get("control_adapter.conv.weight", (0, 0))[1] // wan_inputs.SCALE**2,
    )


#: What a header's config calls models with the keys of others -> their names.
STATED = {"animate2": "Wan Animate 2", "flow_rvs": "Wan FlowRVS"}
PLAIN = ("t2v", "i2v")


def metadata(strings):
    """Refuse models that ComfyUI tells by the header alone. They have the keys of text or image to video, and
    run otherwise. Raises UnsupportedError."""
    stated = transformer_config(strings)
    kind = stated.get("model_type", PLAIN[0])
    name = STATED.get(str(kind), f"a model of type {quoted(kind)}") if kind not in PLAIN else None
    if stated.get("causal_ar"):
        name = "causal Wan, which makes a video piece by piece (causal_ar)"
    if name:
        raise UnsupportedError(
            f"the header's config says that this file is {name}, a variant of wan that is not supported; "
            f"sample it with ComfyUI's own nodes and an ordinary MODEL."
        )
    return {}


ATTENTION = {
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "o": "to_out.0",
    "norm_q": "norm_q",
    "norm_k": "norm_k",
    "k_img": "add_k_proj",
    "v_img": "add_v_proj",
    "norm_k_img": "norm_added_k",
}
#: The key of files with face attentions.
FACE = "face_adapter.fuser_blocks.0.k_norm.weight"
BLOCK = "blocks.{}"
EMBEDDER = "condition_embedder"


def named(name):
    """Refuse a model that nothing but its file's name tells from image to video."""
    if re.search("chrono[-_ ]?edit", name, re.IGNORECASE):
        raise UnsupportedError(
            f"{name} is ChronoEdit, whose positions in time ComfyUI's Scale ROPE sets, which is not "
            f"supported; use KSampler for it."
        )
    return {}


LAYOUT = Layout(
    signature=(
        "patch_embedding.weight",
        "text_embedding.0.weight",
        "time_projection.1.weight",
        "blocks.0.self_attn.q.weight",
        "blocks.0.ffn.0.weight",
        "head.head.weight",
        "head.modulation",
    ),
    absent=("vace_patch_embedding.weight", FACE),  # VACE, Animate
    unread={"model_type.Wan2_1-*": "a mark of WanVideoWrapper's nodes"},
    config=config_from_shapes,
    named=named,
    metadata=metadata,
    names={
        "head.head": "proj_out",
        "head.modulation": "scale_shift_table",
        **under("text_embedding", f"{EMBEDDER}.text_embedder", LAYERS),
        **under("time_embedding", f"{EMBEDDER}.time_embedder", LAYERS),
        "time_projection.1": f"{EMBEDDER}.time_proj",
        "img_emb.proj.0": f"{EMBEDDER}.image_embedder.norm1",
        "img_emb.proj.1": f"{EMBEDDER}.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": f"{EMBEDDER}.image_embedder.ff.net.2",
        "img_emb.proj.4": f"{EMBEDDER}.image_embedder.norm2",
        "img_emb.emb_pos": f"{EMBEDDER}.image_embedder.pos_embed",
        f"{BLOCK}.modulation": f"{BLOCK}.scale_shift_table",
        f"{BLOCK}.norm3": f"{BLOCK}.norm2",
        f"{BLOCK}.ffn.0": f"{BLOCK}.ffn.net.0.proj",
        f"{BLOCK}.ffn.2": f"{BLOCK}.ffn.net.2",
        **under("blocks.{}.self_attn", "blocks.{}.attn1", ATTENTION),
        **under("blocks.{}.cross_attn", "blocks.{}.attn2", ATTENTION),
    },
)
#: What every Wan takes.
ACCEPTED = ("c_crossattn", "clip_fea", "time_dim_concat", "context_latents", "reference_latent")
#: Of files without Fun Control's convolution for a reference image, which ComfyUI ignores then, too.
NO_REFERENCE = {
    "conditioning.ignored": ("reference_latent",),
    "conditioning.notes": {
        "reference_latent": "this file has no reference convolution: the reference image is not used",
    },
}
#: Of 2.2's 5B, which is given frames by a timestep of their own.
FRAME_TIMESTEPS = {
    "noise.clean_inpaint": True,
    "blocks.per_token": {"rotary_emb": ("image", 1), "temb": ("image", 1, 4)},
    "blocks.adapter": OwnTokens(),
}


def variant(config):
    """Return which inputs a Wan has besides ACCEPTED, and 5B's timesteps."""
    by_frame = has_frame_timesteps(config)
    further = {
        "denoise_mask": by_frame,
        "c_concat": not by_frame or config["in_channels"] > 48,
        "camera_conditions": config.get("camera_channels"),
    }
    accepted = (*ACCEPTED, *(name for name, has in further.items() if has))
    unread = {} if config.get("reference_channels") else NO_REFERENCE
    return {"conditioning.accepted": accepted} | unread | (FRAME_TIMESTEPS if by_frame else {})


def count_attention_calls(block: Any) -> int:
    """Count the calls of attention: to itself and the text, and to an image where the model has one."""
    return 2 if block.attn2.add_k_proj is None else 3


def pixels(config) -> tuple[int, int, int]:
    """Return how many pixels (T, H, W) one of the latent's stands for: for 5B's VAE 16 x 16."""
    side = 16 if has_frame_timesteps(config) else 8
    return 4, side, side


FAMILY = Family(
    name="wan",
    transformer="WanTransformer3DModel",
    latent=Latent(channels=itemgetter("out_channels"), frames=True, pixels=pixels),
    io=ModelIO(arguments=forward_args),
    blocks=Blocks(
        output_layer="proj_out",
        lists={"blocks": APART},
        per_token={"rotary_emb": ("image", 1)},
        attention=("image", "cross", "cross"),
        count_attention_calls=count_attention_calls,
        values=(("attn1.to_v",),),
    ),
    conditioning=Conditioning(
        accepted=(*ACCEPTED, "c_concat"),
        context_tokens=wan_inputs.token_count,
        image_features=image_features,
        widths=entries(c_crossattn="text_dim"),
        refusal=refusal,
    ),
    cache=Cache(
        prompt_modules=("rope", "condition_embedder.text_embedder"),
        image_modules=("patch_embedding",),
        token_modules=("patch_embedding",),
        step_modules=("condition_embedder.time_embedder", "condition_embedder.time_proj"),
        prompt_layers=("attn2.to_k", "attn2.to_v", "attn2.add_k_proj", "attn2.add_v_proj"),
    ),
    build=Build(dtypes=FP16_OR_BF16, patch_module=patch_module),
    layout=LAYOUT,
    variant=variant,
)
