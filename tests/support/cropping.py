"""Requests for smaller latents than those of golden cases."""

import torch

#: Most frames of a video.
FRAMES = 2
#: Conditioning that tells of the latent's size in a form of its own.
OF_THE_SIZE = (
    "keyframe_idxs",
    "vace_context",
    "camera_conditions",
    "reference_latent",
    "time_dim_concat",
    "pose_latents",
)


def cropped(tensors: dict[str, torch.Tensor], side: int) -> dict[str, torch.Tensor]:
    """The tensors of a request with at most ``side`` rows and columns of latent pixels. Several latents, and
    what has the latent's size in another form, stay as they are."""
    size = tensors["noise"].shape[2:]
    if len(size) < 2 or any(f"positive.{name}" in tensors for name in OF_THE_SIZE):
        return tensors
    most = tuple(map(slice, (FRAMES, side, side)[-len(size) :]))
    return {
        name: value[(..., *most)].contiguous() if _spreads(value.shape[2:], size) else value
        for name, value in tensors.items()
    }


def _spreads(own: torch.Size, size: torch.Size) -> bool:
    """Is this the size of a latent, or of a mask that spreads to it?"""
    return len(own) == len(size) and all(a in (1, b) for a, b in zip(own, size))
