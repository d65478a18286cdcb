"""What the tensors of a request, or of a call, must be for a family: types, numbers, shapes."""

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..loading.checkpoint import Checkpoint
from ..models.common.argument_shapes import DIMENSIONS, FLOATING, NUMBERS
from ..models.latent_tokens import NestedGrid
from ..parallel.attention.kernel_table import kernel_of
from ..planner.machine import is_latent_shape
from ..quantization.formats import dtype_name
from .model_inputs import ModelInputs

#: Types of a request's tensors; those of its latent and its prompt are floating-point.
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def check_numbers(tensors: dict[str, Tensor]):
    """Refuse NaN and infinity, and types that no model takes. Raises UnsupportedError."""
    for name, value in tensors.items():
        if value.dtype not in TYPES:
            raise UnsupportedError(f"{name:.100} is of {value.dtype}; send float32, float16 or bfloat16.")
        if value.is_floating_point() and not is_finite(value):
            raise UnsupportedError(f"{name} holds NaN or infinity; look at the node that made it.")


def is_finite(value: Tensor) -> bool:
    """Return whether no value is NaN or infinity. A sum shows both in one pass over the tensor, where
    ``isfinite`` takes several; it overflows itself at worst."""
    return math.isfinite(value.sum(dtype=torch.float32).item()) or bool(torch.isfinite(value).all())


def check_result(result: Tensor, name: str, dtype: torch.dtype, attention: str):
    """Refuse a ``result`` of the model in the file ``name`` that holds no number. Raises UnsupportedError.
    Where some values are numbers, ComfyUI shows what there is; zeros among the others are gaps, which the
    model has not computed (latent_tokens.PartialGrid)."""
    if is_finite(result) or result[torch.isfinite(result)].any():
        return
    kind = dtype_name(dtype)
    is_half = dtype == torch.float16
    if not kernel_of(attention).exact:
        remedy = "set attention to auto" + (", or weight_dtype to bf16 or fp32" if is_half else "")
        raise UnsupportedError(
            f"{name} has computed NaN or infinity in every value, in {kind} and with attention {attention}, "
            f"which is approximate and may not hold what it computes; {remedy}, and if that does not help, "
            f"download the file again."
        )
    remedy = "download it again"
    if is_half:
        remedy = "set weight_dtype to bf16 or fp32, or download it again"
    raise UnsupportedError(
        f"{name} has computed NaN or infinity in every value, in {kind}: its weights hold such values, or "
        f"{kind} does not hold what it computes; {remedy}."
    )


def check_latent(shape: tuple[int, ...], shapes: list, checkpoint: Checkpoint, has_more: bool = False):
    """Refuse a ``shape`` that is no latent of this model, or not of ``shapes``. ``has_more``: channels may
    follow the latent's. Raises UnsupportedError."""
    family = checkpoint.family
    nested = family.latent.nested
    if nested is None:
        channels = family.latent.channels(checkpoint.config)
        is_one = not shapes and len(shape) in family.latent.dimensions
        if not is_one or shape[1] < channels or (shape[1] > channels and not has_more):
            wanted = f"{channels} channels{' or more' if has_more else ''}"
            what = f"there are {len(shapes)} latents" if shapes else f"the latent has shape {shape}"
            raise UnsupportedError(
                f"{what} but {family.name} wants {wanted} in (batch, channels, "
                f"{'frames, ' if family.latent.frames else ''}height, width); make it with the model's own "
                f"empty-latent node."
            )
        return
    wanted = nested.channels(checkpoint.config)
    if len(shapes) != len(wanted) or not all(map(is_latent, shapes, wanted)):
        parts = " and ".join(f"{name} of {channels} channels" for name, channels in zip(nested.names, wanted))
        raise UnsupportedError(
            f"the latents have shapes {shapes!r:.200} but {family.name} wants {parts}; "
            f"make them with the model's own empty-latent node."
        )
    if shape[1:] != (1, sum(math.prod(part) for part in shapes)):
        raise UnsupportedError(
            f"the latent has shape {shape}, which does not hold latents of shapes {shapes!r:.200}; pack "
            f"them as (batch, 1, elements of all)."
        )


def is_latent(shape: Any, channels: int) -> bool:
    """Return whether ``shape`` lists (C, [T,] H, W) of so many ``channels``."""
    return is_latent_shape(shape) and shape[0] == channels


def check_arguments(whose: str, given: dict[str, Tensor], inputs: ModelInputs, checkpoint: Checkpoint):
    """Refuse arguments that the family does not take, or that do not fit. Raises UnsupportedError."""
    family = checkpoint.family
    batch = inputs.batch
    grid = inputs.grid
    for name in given:
        if name.partition(".")[0] not in family.conditioning.accepted:
            raise UnsupportedError(
                f"{whose} carries {name!r:.100}, which {family.name} does not support here; it accepts "
                f"{', '.join(family.conditioning.accepted)}."
            )
    for name in family.conditioning.required:
        if name not in given:
            raise UnsupportedError(
                f"{whose} has no {name!r}, which {family.name} needs; encode the prompt with the text "
                f"encoders of this model."
            )
    read = {name: value for name, value in given.items() if name not in family.conditioning.ignored}
    for name, value in given.items():
        if not value.numel() and (
            name in family.conditioning.required or _sides(name, grid) or not value.shape[0]
        ):
            raise UnsupportedError(
                f"{whose}'s {name} has shape {tuple(value.shape)}, which holds nothing; encode the prompt "
                f"again."
            )
        reason = _wrong_form(name, value, batch, grid) if name in read else None
        if reason:
            raise UnsupportedError(f"{whose}'s {name} {reason}")
        if value.ndim and value.shape[0] not in (1, batch):
            raise UnsupportedError(
                f"{whose}'s {name} has batch {value.shape[0]} but the latent has {batch}; use one or one "
                f"for each."
            )
    reason = family.conditioning.refusal(checkpoint.config, grid, given)
    if reason:
        raise UnsupportedError(f"{whose}: {reason}")
    widths = family.conditioning.widths(checkpoint.config)
    sizes = {}
    for name, value in read.items():
        reason = _wrong_size(name, value, widths, sizes, grid)
        if reason:
            raise UnsupportedError(f"{whose}'s {name} {reason}")


def _sides(name, grid) -> tuple[int, ...] | None:
    """Return the sides of the latent that an argument must have, or None."""
    parts = grid.grids if isinstance(grid, NestedGrid) else (grid,)
    last = DIMENSIONS.get(name, ("",))[-1]
    return {"...": parts[0].shape[1:], "... of audio": parts[-1].shape[1:]}.get(last)


def _wrong_form(name, value, batch, grid) -> str | None:
    """Return why an argument has not the dimensions and the type that it has in every family, or None."""
    known = DIMENSIONS.get(name)
    sides = _sides(name, grid)
    if name in NUMBERS and (value.ndim > 1 or value.numel() not in (1, batch)):
        return f"has shape {tuple(value.shape)}, but it is a number, or one for each of the {batch} samples."
    if known is None:
        return None
    dimensions = len(sides) + 2 if sides else len(known)
    if value.ndim == dimensions and (value.dtype in FLOATS or name not in FLOATING):
        return None
    kind = "a floating-point tensor" if name in FLOATING else "a tensor"
    return (
        f"is {value.dtype} of shape {tuple(value.shape)}, but {kind} ({', '.join(map(str, known))}) is "
        f"needed; encode the prompt with the text encoders of this model."
    )


def _wrong_size(name, value, widths, sizes, grid) -> str | None:
    """Return why an argument's sizes do not fit the model, the latent or other arguments, or None. ``sizes``:
    dimension -> the first argument that has it, and its size there."""
    known = DIMENSIONS.get(name, ())
    shape = tuple(value.shape)
    sides = _sides(name, grid)
    if sides and shape[2:] != sides:
        return f"has the size {list(shape[2:])}, but the latent {list(sides)}; make both of one size."
    for what, size in zip(known[1:2] if sides else known[1:], shape[1:]):
        if what == "width":
            if size != widths.get(name, size):
                return (
                    f"has width {size} but this model wants {widths[name]}; it was encoded for another model."
                )
        elif isinstance(what, int):
            if size != what:
                return f"has shape {shape}, but ({', '.join(map(str, known))}) is needed."
        elif sizes.setdefault(what, (name, size))[1] != size:
            other, its_size = sizes[what]
            return f"has {size} {what} but {other} has {its_size}; encode the prompt again."
    return None
