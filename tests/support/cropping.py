"""Requests for smaller latents than those of golden cases."""

import torch

#: Most frames of a video.
FRAMES = 2
#: Conditioning with frames of its own: the video next to it keeps its frames.
OF_OTHER_FRAMES = ("reference_latent", "camera_conditions", "time_dim_concat", "pose_latents")
#: Conditioning of pixels -> how many a pixel of the latent has in a row.
PIXELS = {"camera_conditions": 8}
#: What may look like a latent and is none.
WHOLE = ("face_pixel_values",)
#: Conditioning that tells of tokens one by one: the latent stays as it is.
OF_TOKENS = "positive.keyframe_idxs"


def cropped(tensors: dict[str, torch.Tensor], side: int) -> dict[str, torch.Tensor]:
    """The tensors of a request with at most ``side`` rows and columns of latent pixels, those in the middle,
    where masks divide them. Several latents stay as they are."""
    size = tensors["noise"].shape[2:]
    if len(size) < 2 or OF_TOKENS in tensors:
        return tensors
    has_others = any(name.endswith(OF_OTHER_FRAMES) for name in tensors)
    frames = size[0] if has_others else min(FRAMES, size[0])
    return {name: _cropped(name, value, size, frames, side) for name, value in tensors.items()}


def _cropped(name: str, value: torch.Tensor, size: torch.Size, frames: int, side: int) -> torch.Tensor:
    """``value`` cropped where it has the latent's rows and columns, or is a mask that spreads to them."""
    argument = name.rpartition(".")[2]
    pixels = PIXELS.get(argument, 1)
    spreads = all(a in (1, b * pixels) for a, b in zip(value.shape[-2:], size[-2:]))
    if value.ndim < 4 or argument in WHOLE or not spreads:
        return value
    if len(size) == 3 and value.shape[-3] == size[0]:
        value = value.narrow(-3, 0, frames)
    for dim in (-2, -1):
        if value.shape[dim] > 1:
            cropped = min(side, size[dim])
            value = value.narrow(dim, (size[dim] - cropped) // 2 * pixels, cropped * pixels)
    return value.contiguous()
