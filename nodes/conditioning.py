"""CONDITIONING -> the transformer's arguments, by ComfyUI's own code; what the backend cannot do is refused by name."""

import torch

from ..backend.protocol import RefusedError
from .families import Family

#: Keys of a CONDITIONING that change the answer in ways that the backend does not have, and the nodes that set them.
REFUSED = {
    "control": "a ControlNet",
    "area": "an area (Conditioning Set Area)",
    "mask": "a mask (Conditioning Set Mask)",
    "hooks": "hooks (LoRA or other hooks on a prompt)",
    "gligen": "GLIGEN boxes",
    "default": "a default for the unmasked area (Cond Set Default Combine)",
    "reference_latents": "reference images (ReferenceLatent)",
    "concat_latent_image": "an image that is given to the model as extra channels (inpainting and control models)",
    "concat_mask": "a mask that is given to the model as an extra channel (inpainting models)",
    "noise_concat": "extra channels for the model",
    "unclip_conditioning": "unCLIP images",
    "attention_mask_img_shape": "an attention mask over the picture (style models)",
    "additional_models": "additional models",
}
#: Keys that are harmless at one value, which some nodes write too.
_NEUTRAL = {"start_percent": 0.0, "end_percent": 1.0, "clip_start_percent": 0.0, "clip_end_percent": 1.0, "strength": 1.0}
_MEANING = {
    "start_percent": "a timestep range", "end_percent": "a timestep range", "strength": "a strength of its own",
    "clip_start_percent": "a scheduled prompt", "clip_end_percent": "a scheduled prompt",
}


def check_conditioning(name: str, conditioning: list, family_name: str, family: Family):
    """RefusedError for the first thing in ``conditioning`` that the backend would have to drop; ``name`` is the input's."""
    if len(conditioning) != 1:
        raise RefusedError(f"{name} holds {len(conditioning)} prompts (Conditioning Combine), but ParallelSampler takes one; use Conditioning Concat or Conditioning Average, or sample with KSampler.")
    values = conditioning[0][1]
    for key, what in REFUSED.items():
        if values.get(key) is not None and key not in family.accepts:
            raise RefusedError(f"{name} has {what} ({key!r}), which ParallelSampler does not run; remove that node or sample with KSampler.")
    for key, neutral in _NEUTRAL.items():
        if values.get(key, neutral) != neutral:
            raise RefusedError(f"{name} has {_MEANING[key]} ({key!r} is {values[key]}), which ParallelSampler does not run; remove that node or sample with KSampler.")
    for key in family.needs:
        if key not in values:
            raise RefusedError(f"{name} has no {key!r}, which {family_name} needs; encode the prompt with the text encoders of {family_name}.")


def model_arguments(name: str, conds: list[dict], batch: int, accepted: list[str]) -> dict[str, torch.Tensor]:
    """The transformer's arguments by ComfyUI's names (c_crossattn, y, guidance, ...), each of ``batch`` rows.

    ``conds``: one entry as comfy.samplers.process_conds leaves it. ``accepted``: the names that the backend takes.
    """
    arguments = {key: cond.process_cond(batch_size=batch, area=None).cond for key, cond in conds[0]["model_conds"].items()}
    for key, value in arguments.items():
        if key not in accepted:
            raise RefusedError(f"{name} gives the model {key!r}, which the backend does not take (it takes {', '.join(accepted)}); remove the node that sets it or sample with KSampler.")
        if isinstance(value, (bool, int, float)):
            arguments[key] = torch.tensor(value)
        elif not isinstance(value, torch.Tensor):
            raise RefusedError(f"{name} gives the model {key!r} as {type(value).__name__}, where the backend takes a tensor.")
    return arguments


def fill_zeros(arguments: dict, batch: int, family: Family, unet_config: dict) -> dict:
    """``arguments`` with the zeros (batch, width) that ComfyUI's own model takes for what a CONDITIONING leaves out."""
    zeros = {key: torch.zeros(batch, unet_config[width]) for key, width in family.zeros.items()}
    return {**zeros, **arguments}
