"""Wan 2.2 Animate of Alibaba, a character moved by a video: Wan with a pose video added to its tokens, and
after every fifth block an attention of each frame's tokens to that frame's face."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from . import wan
from .common import wan_blocks
from .common.call_state import call_state
from .common.tensor_plans import COMMON
from .family import Family, ModelIO
from .key_layout import blocks_of, under

#: Blocks from one face attention to the next, and faces that are encoded at once.
EVERY, FACES_AT_ONCE = 5, 8


class FaceAttention:
    """Processor of diffusers' face attention for tokens of any frames: a token reads its frame's face."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        """Attend to the face. hidden_states: (B, tokens, D); encoder_hidden_states: (B, frames, parts of a
        face, D); attention_mask: (tokens, frames times parts), True where a token reads."""

        def apart(x):
            return x.unflatten(2, (attn.heads, -1)).transpose(1, 2)

        faces = attn.pre_norm_kv(encoder_hidden_states).flatten(1, 2)
        query = attn.norm_q(apart(attn.to_q(attn.pre_norm_q(hidden_states))))
        key = attn.norm_k(apart(attn.to_k(faces)))
        value = apart(attn.to_v(faces))
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return attn.to_out(read.transpose(1, 2).flatten(2))


class AnimateBlock(wan_blocks.WanBlock):
    """A block of Wan, and its face attention where it has one (``face``, else None).

    rotary_emb: cosines, sines, and the number of each token's frame (1, tokens, 1, 1). call: what
    patch_module's hooks keep of the call under way.
    """

    face: nn.Module | None
    call: SimpleNamespace

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb):
        cos, sin, frames = rotary_emb
        rotary: Any = (cos, sin)  # as diffusers' own model gives it
        out = super().forward(hidden_states, encoder_hidden_states, temb, rotary)
        faces = self.call.faces
        if self.face is None or faces is None:
            return out
        of_faces = torch.arange(faces.shape[1], device=frames.device).repeat_interleave(faces.shape[2])
        return out + self.face(out, faces, frames.view(-1, 1) == of_faces)


def encoded_faces(transformer, pixels: Tensor, frames: int) -> Tensor:
    """Encode (B, 3, frames, H, W) as (B, frames of the latent, parts, D). The first frame, that of the
    reference image, has zeros, and so have those after the last face."""
    images = pixels.transpose(1, 2)
    pieces = [transformer.motion_encoder(each) for each in images.flatten(0, 1).split(FACES_AT_ONCE)]
    faces = transformer.face_encoder(torch.cat(pieces).unflatten(0, images.shape[:2]))
    return F.pad(faces, (0, 0, 0, 0, 1, frames - 1 - faces.shape[1]))


def patch_module(transformer, config):
    """Give face attentions to the blocks that they follow, and run Wan's own forward."""
    wan.patch_module(transformer, config)
    attentions = list(transformer.face_adapter)
    del transformer.face_adapter
    call = call_state(transformer, {"pose_latents": None, "face_pixel_values": None}, faces=None)
    for index, block in enumerate(transformer.blocks):
        block.__class__ = AnimateBlock
        block.call = call
        block.face = attentions[index // EVERY] if index % EVERY == 0 else None
        if block.face is not None:
            block.face.set_processor(FaceAttention())
    plain_rope = transformer.rope.forward

    def encode(transformer, args, kwargs):
        if call.face_pixel_values is not None:
            frames = kwargs["hidden_states"].shape[2] // config["patch_size"][0]
            call.faces = encoded_faces(transformer, call.face_pixel_values, frames)

    def embed(convolution, args, x):
        if call.pose_latents is not None:
            pose = transformer.pose_patch_embedding(call.pose_latents)[:, :, : x.shape[2] - 1]
            x = x + F.pad(pose, (0, 0, 0, 0, 1, x.shape[2] - 1 - pose.shape[2]))
        return x

    def rotate(latent):
        cos, sin = plain_rope(latent)
        frames = latent.shape[2] // config["patch_size"][0]
        numbers = torch.arange(frames, device=cos.device).repeat_interleave(cos.shape[1] // frames)
        return cos, sin, numbers.view(1, -1, 1, 1)

    transformer.register_forward_pre_hook(encode, with_kwargs=True)
    transformer.forward = WanTransformer3DModel.forward.__get__(transformer)
    # before the tokens are joined with others, and flattened
    transformer.patch_embedding.register_forward_hook(embed, prepend=True)
    transformer.rope.forward = rotate


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward. pose_latents: (B, C, frames, H, W) of the pose video, with the
    latent's sides. face_pixel_values: (B, 3, frames, size, size), of the size of the face's encoder."""
    found = wan.forward_args(config, grid, latent, sigma, cond)
    return found | {name: cond.get(name) for name in ("pose_latents", "face_pixel_values")}


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. The pose has the latent's size, and faces that of their
    encoder."""
    pose: Tensor | None = cond.get("pose_latents")
    channels = config["latent_channels"]
    sides = list(grid.shape[2:])
    if pose is not None:
        if not _is_video(pose, channels, sides):
            return (
                f"pose_latents has shape {list(pose.shape)}, but this model takes {channels} channels of "
                f"{' x '.join(map(str, sides))} for this latent; give WanAnimateToVideo the latent's size."
            )
        if sides != list(grid.padded.shape[2:]):
            return f"pose_latents needs a latent of even sides, and this one is {sides[0]} x {sides[1]}."
    faces: Tensor | None = cond.get("face_pixel_values")
    size = config["motion_encoder_size"]
    if faces is not None and not _is_video(faces, 3, [size, size]):
        return (
            f"face_pixel_values has shape {list(faces.shape)}, but this model takes a video of 3 channels "
            f"and {size} x {size} pixels; use WanAnimateToVideo, which makes it so."
        )
    return wan.refusal(config, grid, cond)


def _is_video(value: Tensor, channels: int, sides: list[int]) -> bool:
    """Return whether it is (batch, channels, frames, *sides), and not empty."""
    if value.ndim != 5 or not value.numel():
        return False
    return [value.shape[1], *value.shape[3:]] == [channels, *sides]


def count_attention_calls(block) -> int:
    """Count the calls of attention: to itself, the prompt, the image's features, and maybe the face."""
    return 3 + (block.face is not None and block.call.faces is not None)


ENCODER = "motion_encoder.enc.net_app.convs"


def config_from_shapes(shapes):
    """Return the arguments of the diffusers class; each block of the face's encoder halves its sides."""
    blocks = blocks_of(shapes, ENCODER) - 2
    size = 4 << blocks
    widths = [shapes[f"{ENCODER}.0.0.weight"][0]]
    widths += [shapes[f"{ENCODER}.{i}.conv2.1.weight"][0] for i in range(1, blocks + 1)]
    hidden = shapes["face_encoder.conv2.conv.weight"][0]
    return wan.config_from_shapes(shapes) | dict(
        latent_channels=shapes["pose_patch_embedding.weight"][1],
        motion_encoder_channel_sizes={str(size >> i): width for i, width in enumerate(widths)},
        motion_encoder_size=size,
        motion_style_dim=shapes[f"{ENCODER}.{blocks + 1}.weight"][0],
        motion_dim=shapes["motion_encoder.dec.direction.weight"][1],
        motion_encoder_dim=shapes["motion_encoder.dec.direction.weight"][0],
        face_encoder_hidden_dim=hidden,
        face_encoder_num_heads=shapes["face_encoder.conv1_local.conv.weight"][0] // hidden,
        inject_face_latents_blocks=EVERY,
    )


FACE = {
    "linear1_kv": "to_k to_v",
    "linear1_q": "to_q",
    "linear2": "to_out",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}


def face_names(config):
    """Return Layout.names of the face attentions and of the face's encoder, whose blocks begin at 1."""
    names = {}
    for number in range(config["num_layers"] // EVERY):
        names |= under(f"face_adapter.fuser_blocks.{number}", f"blocks.{EVERY * number}.face", FACE)
    blocks = len(config["motion_encoder_channel_sizes"]) - 1
    names[f"{ENCODER}.{blocks + 1}.weight"] = "motion_encoder.conv_out.weight"
    for i in range(1, blocks + 1):
        ours = f"motion_encoder.res_blocks.{i - 1}"
        for name, at in (("conv1", 0), ("conv2", 1)):
            names[f"{ENCODER}.{i}.{name}.{at}.weight"] = f"{ours}.{name}.weight"
            names[f"{ENCODER}.{i}.{name}.{at + 1}.bias"] = f"{ours}.{name}.act_fn.bias"
        names[f"{ENCODER}.{i}.skip.1.weight"] = f"{ours}.conv_skip.weight"
    return names


def moved(config):
    """Return Layout.moved: where diffusers' files keep the face attentions."""
    return {
        f"blocks.{EVERY * number}.face.": f"face_adapter.{number}."
        for number in range(config["num_layers"] // EVERY)
    }


LAYOUT = replace(
    wan.LAYOUT,
    signature=(*wan.LAYOUT.signature, wan.FACE),
    absent=(),
    config=config_from_shapes,
    moved=moved,
    reshaped=(
        "motion_encoder.conv_in.act_fn.bias",
        *(f"motion_encoder.res_blocks.{{}}.conv{i}.act_fn.bias" for i in (1, 2)),
    ),
    unread={f"{ENCODER}.*.kernel": "a blur, which is computed"},
    names={
        **wan.LAYOUT.names,
        f"{ENCODER}.0.0.weight": "motion_encoder.conv_in.weight",
        f"{ENCODER}.0.1.bias": "motion_encoder.conv_in.act_fn.bias",
        **{f"motion_encoder.enc.fc.{i}": f"motion_encoder.motion_network.{i}" for i in range(5)},
        "motion_encoder.dec.direction.weight": "motion_encoder.motion_synthesis_weight",
        **{f"face_encoder.{name}.conv": f"face_encoder.{name}" for name in ("conv1_local", "conv2", "conv3")},
    },
)
FAMILY: Family = wan.FAMILY.changed(
    {
        "name": "wan-animate",
        "transformer": "WanAnimateTransformer3DModel",
        "io": ModelIO(arguments=forward_args),
        "blocks.attention": ("image", "cross", "cross", "cross"),
        "blocks.count_attention_calls": count_attention_calls,
        "conditioning.accepted": ("c_crossattn", "c_concat", "clip_fea", "pose_latents", "face_pixel_values"),
        "conditioning.refusal": refusal,
        "cache.prompt_modules": (*wan.FAMILY.cache.prompt_modules, "motion_encoder", "face_encoder"),
        "cache.prompt_layers": (*wan.FAMILY.cache.prompt_layers, "face.to_k", "face.to_v"),
        # diffusers reads the type of a layer in the embedder before it
        "cache.step_modules": ("condition_embedder.time_proj",),
        "build.patch_module": patch_module,
        "tensor_plan": {**COMMON, "*.face.to_out": "rowwise"},
        "layout": LAYOUT,
        "variant": lambda config: {
            "layout": replace(LAYOUT, names={**LAYOUT.names, **face_names(config)}),
        },
    }
)
