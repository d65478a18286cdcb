"""What Wan's variants are given besides latent, image and prompt. Reference tokens follow the latent's: an
image (Fun Control), frames after the video's (Phantom), images and videos in context (Bernini). A camera's
path (Fun Camera) is added to the latent's tokens."""

import math

import torch
from torch import Tensor, nn

from ..latent_tokens import TokenGrid
from .call_state import call_state
from .references import latent_grid, listed

#: Names of what is given so, as ComfyUI's model calls them.
NAMES = ("reference_latent", "time_dim_concat", "context_latents", "camera_conditions")
#: Pixels along a side of the image to one of the latent's.
SCALE = 8


def given(config, cond) -> dict[str, Tensor]:
    """Return those of the arguments ``cond`` that the model reads: no image without its convolution."""
    names = NAMES if config.get("reference_channels") else NAMES[1:]
    return {name: value for name, value in cond.items() if name.partition(".")[0] in names}


def _videos(cond) -> list[Tensor]:
    """Return what is embedded as the latent is, in the order of its tokens."""
    later = [cond["time_dim_concat"]] if "time_dim_concat" in cond else []
    return [*later, *listed(cond, "context_latents")]


def token_count(config, grid: TokenGrid, cond) -> int:
    """Count the reference tokens: Conditioning.context_tokens."""
    count = grid.counts[1] * grid.counts[2] if "reference_latent" in given(config, cond) else 0
    return count + sum(latent_grid(latent, grid).tokens for latent in _videos(cond))


def refusal(config, grid: TokenGrid, cond) -> str | None:
    """Return why these inputs do not fit the latent, or None."""
    sides = list(grid.shape[2:])
    for name, value in given(config, cond).items():
        kind, _, number = name.partition(".")
        # those in context are numbered, and no others
        if (kind == "context_latents") != number.isdecimal():
            return f"there is an input {name}; call those in context context_latents.0 and so on."
        if not value.is_floating_point():
            return f"{name} is {value.dtype}, where a floating-point tensor is needed; encode it again."
        wanted = _shape(config, grid, kind)
        pairs = zip(wanted, value.shape[1:])
        is_wrong = value.ndim != 1 + len(wanted) or any(want not in (None, size) for want, size in pairs)
        if is_wrong or not value.numel():
            channels, *_, height, width = wanted
            size = "" if height is None else f" of {height} x {width}"
            return (
                f"{name} has shape {list(value.shape)}, but this model takes {channels} channels{size} for a "
                f"latent of {grid.shape[1]} x {sides[0]} x {sides[1]}; use the conditioning node of this "
                f"model, with the same size."
            )
        if kind in ("reference_latent", "camera_conditions") and sides != list(grid.padded.shape[2:]):
            return f"{name} needs a latent of even sides, and this one is {sides[0]} x {sides[1]}."
        if "denoise_mask" in cond:
            return f"{name} and given frames (a noise mask) cannot be used together; remove one of them."
    return None


def _shape(config, grid: TokenGrid, kind: str) -> tuple[int | None, ...]:
    """Return the shape (channels, [frames,] height, width) that an input has; None for any size."""
    frames, *sides = grid.shape[1:]
    if kind == "reference_latent":
        return config["reference_channels"], *sides
    if kind == "camera_conditions":  # a number for each pixel
        return config["camera_channels"], frames, *(SCALE * side for side in sides)
    # context and later frames are embedded as the latent is, and have its channels
    if kind == "context_latents":
        return config["in_channels"], None, None, None
    return config["in_channels"], None, *sides


def padded(config, grid: TokenGrid, cond) -> dict[str, Tensor]:
    """Return the inputs as the transformer's forward takes them, under ``further``."""
    inputs = given(config, cond)
    for name, value in inputs.items():
        if value.ndim == 5 and name != "camera_conditions":
            inputs[name] = latent_grid(value, grid).pad(value)
    return inputs


class CameraResidual(nn.Module):
    """Two convolutions next to an identity; names are those of the files."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(torch.relu(self.conv1(x)))


class CameraAdapter(nn.Module):
    """Plücker coordinates of every pixel (B, C, T, 8 H, 8 W) -> (B, D, T, H', W') of the tokens, as in
    VideoX-Fun."""

    def __init__(self, channels: int, width: int, patch: tuple[int, int]):
        super().__init__()
        self.conv = nn.Conv2d(channels * SCALE**2, width, patch, patch)
        self.residual_blocks = nn.Sequential(CameraResidual(width))

    def forward(self, camera: Tensor) -> Tensor:
        frames = camera.transpose(1, 2).flatten(0, 1)
        embedded = self.residual_blocks(self.conv(nn.functional.pixel_unshuffle(frames, SCALE)))
        batch, _, length = camera.shape[:3]
        return embedded.unflatten(0, (batch, length)).transpose(1, 2)


def patch_module(transformer, config):
    """Let the transformer's forward take ``further``, what ``padded`` returns."""
    _, rows, columns = config["patch_size"]
    patch = (rows, columns)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    if config.get("reference_channels"):
        transformer.ref_conv = nn.Conv2d(config["reference_channels"], width, patch, patch)
    if config.get("camera_channels"):
        transformer.control_adapter = CameraAdapter(config["camera_channels"], width, patch)
    call = call_state(transformer, {"further": {}}, tokens=None)
    plain_rope = transformer.rope.forward

    def count(transformer, args, kwargs):
        call.tokens = kwargs["hidden_states"][0, 0].numel() // math.prod(config["patch_size"])

    def embed(convolution, args, x):
        if "camera_conditions" in call.further:
            x = x + transformer.control_adapter(call.further["camera_conditions"])
        tokens = [x.flatten(2)]
        if "reference_latent" in call.further:
            tokens.append(transformer.ref_conv(call.further["reference_latent"]).flatten(2))
        # its forward alone: a call would come back here
        tokens += [convolution.forward(latent).flatten(2) for latent in _videos(call.further)]
        return torch.cat(tokens, dim=2) if len(tokens) > 1 else tokens[0]

    def rotate(latent):
        return rotary(plain_rope, config["patch_size"], latent, call.further)

    transformer.register_forward_pre_hook(count, with_kwargs=True)
    transformer.patch_embedding.register_forward_hook(embed)
    transformer.norm_out.register_forward_pre_hook(lambda norm, args: (args[0][:, : call.tokens],))
    transformer.rope.forward = rotate


def rotary(plain, patch, latent: Tensor, further) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each (1, tokens, 1, head size), of the latent's tokens and of the reference tokens.

    ``plain``: video (B, C, T, H, W) -> the same of its tokens. The image of Fun Control is at time 0 and the
    video follows; Phantom's frames follow the video; what is in context begins anew, turned by its number on
    all axes.
    """
    if not further:
        return plain(latent)
    frames = latent.shape[2] // patch[0]
    start = int("reference_latent" in further)
    later = further["time_dim_concat"].shape[2] // patch[0] if "time_dim_concat" in further else 0
    count = start + frames + later
    whole_video = latent.new_empty(1, device="meta").expand(1, 1, count * patch[0], *latent.shape[3:])
    tables = []
    for table in plain(whole_video):
        of_frame = table.shape[1] // count
        image, video, after = table.split([start * of_frame, frames * of_frame, later * of_frame], dim=1)
        tables.append([video, image, after])
    for number, reference in enumerate(listed(further, "context_latents"), 1):
        cos, sin = plain(reference)
        for pieces, piece in zip(tables, _turned(cos, sin, number)):
            pieces.append(piece)
    cos, sin = (torch.cat(pieces, dim=1) for pieces in tables)
    return cos, sin


def _turned(cos: Tensor, sin: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Turn tables (1, tokens, 1, head size) by the position ``number`` along all features."""
    size = cos.shape[-1]
    steps = torch.arange(0, size, 2, dtype=torch.float64, device=cos.device) / size
    angles = (number / 10000.0**steps).repeat_interleave(2)
    more_cos = angles.cos().to(cos.dtype)
    more_sin = angles.sin().to(cos.dtype)
    return cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin
