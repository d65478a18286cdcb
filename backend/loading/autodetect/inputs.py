"""How the forward of a diffusers class without a family file is filled: the arguments that are known."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...models.common.request_arguments import once
from ...models.latent_tokens import TokenGrid

#: Parameter of a forward -> names that configurations have for its width.
WIDTHS = {
    "encoder_hidden_states": (
        *("joint_attention_dim", "text_embed_dim", "caption_channels", "caption_projection_dim"),
        *("cross_attention_dim", "text_dim", "cap_feat_dim", "context_in_dim"),
    ),
    "pooled_projections": ("pooled_projection_dim",),
}
#: Parameter of a forward -> ComfyUI's name of what fills it.
CONDITIONING = {
    "encoder_hidden_states": "c_crossattn",
    "pooled_projections": "y",
    "guidance": "guidance",
    "encoder_attention_mask": "attention_mask",
}
#: Class whose pipeline computes positions -> (text is numbered on both axes, the image comes after it).
POSITIONS = {
    "FluxTransformer2DModel": (False, False),
    "OvisImageTransformer2DModel": (True, False),
    "LongCatImageTransformer2DModel": (True, True),
}
#: Arguments of classes that want the image's size.
SIZES = {"original_size", "target_size", "crop_coords"}
#: Pixels of a latent cell's side, in them.
PIXELS = 8


@dataclass(frozen=True)
class Inputs:
    """How a class's forward is filled. names: its parameters that are; packed: tokens of 2 x 2 latent cells
    instead of the latent; video: the latent has a time axis; scale: timestep / sigma; guided: it takes
    guidance; inverted: time runs from noise (0) to image (1), and the output leads there (Mochi's scheduler);
    numbers_text, image_last: as in POSITIONS."""

    names: tuple[str, ...]
    packed: bool
    video: bool
    scale: float = 1.0
    guided: bool = False
    inverted: bool = False
    numbers_text: bool = False
    image_last: bool = False

    def __call__(
        self, config, grid: TokenGrid, latent: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]
    ) -> dict:
        """Return the arguments of the forward; latent (B, C, [T,] H, W) is padded to whole tokens here."""
        batch = latent.shape[0]
        time = (1.0 - sigma if self.inverted else sigma) * self.scale
        values: dict = {ours: cond.get(comfy) for ours, comfy in CONDITIONING.items()}
        values["hidden_states"] = grid.to_tokens(latent) if self.packed else grid.pad(latent)
        values["timestep"] = time.expand(batch).to(latent.device)
        values["guidance"] = cond["guidance"].reshape(-1).expand(batch) if self.guided else None
        values |= zip(("num_frames", "height", "width"), grid.counts)
        text = cond.get("c_crossattn")
        if "encoder_attention_mask" in self.names and "attention_mask" not in cond:
            values["encoder_attention_mask"] = once(cond, "ones", _ones, text)
        if "img_ids" in self.names:
            values["img_ids"] = once(cond, "img_ids", _positions, grid, text, self.image_last)
        if "txt_ids" in self.names:
            values["txt_ids"] = once(cond, "txt_ids", _text_positions, text, self.numbers_text)
        if SIZES & set(self.names):
            values |= once(cond, "sizes", _sizes, grid, latent)
        return {name: values[name] for name in self.names}


#: What Inputs can fill.
FILLABLE = (
    *("hidden_states", "timestep", "img_ids", "txt_ids", "original_size", "target_size", "crop_coords"),
    *("num_frames", "height", "width", *CONDITIONING),
)


def cannot_run(cls: type, why: str) -> UnsupportedError:
    """Return the refusal of a class that would need a family file."""
    return UnsupportedError(
        f"the transformer class {cls.__name__} has no family file, and cannot run without one: {why}. "
        f"docs/adding_a_model.md says how to add a family."
    )


def _ones(text):
    return text.new_ones(text.shape[:2], dtype=torch.long)


def _sizes(grid, latent):
    """Return SIZES, (B, 2) of (height, width); their numbers wait for the device on their way to it."""
    batch = latent.shape[0]
    size = latent.new_tensor([[side * PIXELS for side in grid.extent[1:]]]).expand(batch, 2)
    return {"original_size": size, "target_size": size, "crop_coords": latent.new_zeros(batch, 2)}


def _positions(grid, text, image_last):
    """Return (tokens, 3) of (kind, y, x)."""
    start = text.shape[1] if image_last else 0
    sides = [torch.arange(start, start + n, device=text.device, dtype=torch.float32) for n in grid.counts[1:]]
    y, x = torch.meshgrid(*sides, indexing="ij")
    return torch.stack([torch.full_like(y, float(start > 0)), y, x], dim=-1).reshape(-1, 3)


def _text_positions(text, is_numbered):
    """Return (tokens, 3) of (kind, y, x)."""
    numbers = torch.arange(text.shape[1], device=text.device, dtype=torch.float32)[:, None] * is_numbered
    return torch.cat([torch.zeros_like(numbers), numbers, numbers], dim=1)


def inputs_of(cls, config) -> Inputs:
    """Return how the forward of ``cls`` is filled. Raises UnsupportedError."""
    parameters = inspect.signature(cls.forward).parameters.values()
    for p in parameters:
        if p.default is p.empty and p.name not in ("self", "return_dict", *FILLABLE):
            raise cannot_run(cls, f"its forward needs {p.name!r}, which nothing here fills")
    names = tuple(p.name for p in parameters if p.name in FILLABLE)
    if "hidden_states" not in names or "timestep" not in names:
        what = f"the transformer class {cls.__name__} has no family file, and its forward takes no"
        raise UnsupportedError(f"{what} hidden_states and timestep; it is no denoiser of latents.")
    if "img_ids" in names and cls.__name__ not in POSITIONS:
        raise cannot_run(cls, "its pipeline computes 'img_ids', and nothing here tells how")
    guided = bool(config.get("guidance_embeds"))
    numbers_text, image_last = POSITIONS.get(cls.__name__, (False, False))
    return Inputs(
        names,
        packed="img_ids" in names,
        video=is_video(cls),
        guided=guided,
        numbers_text=numbers_text,
        image_last=image_last,
    )


def is_video(cls: type) -> bool:
    """Return whether the latent of this class has a time axis."""
    return "3D" in cls.__name__
