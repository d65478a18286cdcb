"""CONDITIONING -> the transformer's arguments, by ComfyUI's own code; the rest is refused by name."""

import comfy.conds
import comfy.samplers
import torch

from ...backend.protocol import REFERENCE_METHODS, RefusedError
from ..comfy_models.registry import ComfyFamily

#: Keys of a CONDITIONING that change the answer in ways that the backend does not have, and the nodes that
#: set them.
REFUSED = {
    "control": "a ControlNet",
    "area": "an area (Conditioning Set Area)",
    "set_area_to_bounds": 'a mask whose bounds are an area (Conditioning Set Mask with set_cond_area "mask '
    'bounds")',
    "hooks": "hooks (LoRA or other hooks on a prompt)",
    "gligen": "GLIGEN boxes",
    "default": "a default for the unmasked area (Cond Set Default Combine)",
    "reference_latents": "reference images (ReferenceLatent)",
    "noise_concat": "extra channels for the model",
    "unclip_conditioning": "unCLIP images",
    "attention_mask_img_shape": "an attention mask over the image (style models)",
    "additional_models": "additional models",
}
#: The same of keys that most models do not read, or read as channels that the backend takes (c_concat).
REFUSED_BY_SOME = {
    "concat_latent_image": "an image for inpainting or control",
    "concat_mask": "a mask for inpainting",
}
#: What ComfyUI does around the transformer; the rest needs its weights in ComfyUI's process.
_AROUND = {"area", "set_area_to_bounds", "default"}


def check_conditioning(name: str, conditioning: list, family_name: str, family: ComfyFamily):
    """Raise RefusedError for the first thing in the input ``name`` that the backend would have to drop."""
    if not conditioning:
        raise RefusedError(f"{name} holds no prompt; connect a text encoder.")
    for _, values in conditioning:
        further = {key: what for key, what in REFUSED_BY_SOME.items() if key in family.refuses}
        for key, what in (REFUSED | further).items():
            value = values.get(key)
            if value is not None and value is not False and key not in family.accepts:
                raise RefusedError(
                    f"{name} has {what} ({key!r}), which Parallel Sampler does not run; {_remedy(key)}."
                )
        for key in family.needs:
            if key not in values:
                raise RefusedError(
                    f"{name} has no {key!r}, which {family_name} needs; encode the prompt with the text "
                    f"encoders of {family_name}."
                )


def _remedy(key: str) -> str:
    model = "on the MODEL of Parallel Model" if key in _AROUND else "and an ordinary MODEL"
    return f"remove that node, or sample with KSampler {model}"


def latent_shapes(cond: dict) -> list[list[int]]:
    """Return [C, [T,] H, W] of each of several latents that are packed in one; empty where there is one.
    ``cond``: as in model_arguments."""
    known = cond["model_conds"].get("latent_shapes")
    return [list(shape[1:]) for shape in known.cond] if known is not None and len(known.cond) > 1 else []


def model_arguments(
    name: str, cond: dict, batch: int, accepted: list[str], family: ComfyFamily, other: dict | None = None
) -> dict[str, torch.Tensor]:
    """Return the transformer's arguments by ComfyUI's names (c_crossattn, y, guidance, ...), each of
    ``batch`` samples; a list becomes KEY.0, KEY.1, ... ``cond``: one prompt as comfy.samplers.process_conds
    leaves it; ``other``: the other one, where there are two. ``accepted``: the names that the backend
    takes."""
    arguments = _of_batch(cond, batch)
    values = {key: value.cond for key, value in arguments.items()}
    if other:
        values = _in_one_batch(arguments, _of_batch(other, batch))
    return as_tensors(name, family.translate(values), accepted)


def as_tensors(name: str, arguments: dict, accepted: list[str]) -> dict[str, torch.Tensor]:
    """Return model arguments as they are sent, a list as KEY.0, KEY.1, ... RefusedError, which says that
    ``name`` sets it, for one that the backend does not take."""
    tensors = {}
    for key, value in arguments.items():
        if key not in accepted:
            raise RefusedError(
                f"{name} gives the model {key!r}, which the backend does not take (it takes "
                f"{', '.join(accepted)}); {_remedy(key)}."
            )
        if isinstance(value, list) and all(isinstance(part, torch.Tensor) for part in value):
            tensors |= {f"{key}.{i}": part for i, part in enumerate(value)}
        elif key == "ref_latents_method" and value in REFERENCE_METHODS:
            tensors[key] = torch.tensor(REFERENCE_METHODS.index(value))
        elif isinstance(value, (bool, int, float, torch.Tensor)):
            tensors[key] = torch.as_tensor(value)
        else:
            raise RefusedError(
                f"{name} gives the model {key!r} as {type(value).__name__} ({value!r:.80}), where the "
                f"backend takes a tensor; {_remedy(key)}."
            )
    return tensors


def _of_batch(cond: dict, batch: int) -> dict[str, comfy.conds.CONDRegular]:
    return {
        key: value.process_cond(batch_size=batch, area=None)
        for key, value in cond["model_conds"].items()
        if key != "latent_shapes"
    }


def _in_one_batch(own: dict, other: dict) -> dict:
    """Return the values of ``own`` as in ComfyUI's batch with ``other``: for one batch of two lengths it
    repeats the shorter prompt, which joint attention notices."""
    together = comfy.samplers.cond_equal_size(own, other)
    values = {key: cond.cond for key, cond in own.items()}
    for key, cond in own.items():
        text = together and isinstance(cond, comfy.conds.CONDCrossAttn)
        if text and cond.cond.shape != other[key].cond.shape:
            values[key] = cond.concat([other[key]])[: len(cond.cond)]
    return values


def limits_and_weight(cond: dict, noise: torch.Tensor) -> tuple[dict, torch.Tensor | None]:
    """Return (entry of Sample.prompts, weight by position or None) of a prompt, ``cond`` as in
    model_arguments, for ``noise`` (B, C, [T,] H, W). The weight (B, 1, [T,] H, W) is ComfyUI's own, of
    strength and mask."""
    names = (("from", "timestep_start"), ("until", "timestep_end"))
    limits = {key: float(cond[limit]) for key, limit in names if limit in cond}
    if "mask" not in cond:
        return {**limits, "strength": float(cond.get("strength", 1.0))}, None
    always = {key: value for key, value in cond.items() if key not in ("timestep_start", "timestep_end")}
    return limits, comfy.samplers.get_area_and_mult(always, noise, None).mult[:, :1]


def fill_zeros(arguments: dict, batch: int, family: ComfyFamily, config: dict) -> dict:
    """Return ``arguments`` with the zeros that ComfyUI's model takes for what a CONDITIONING leaves out."""
    zeros = {key: torch.zeros(batch, config[width]) for key, width in family.zeros.items()}
    return {**zeros, **arguments}
