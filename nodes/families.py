"""ComfyUI's own model object of a transformer family, without weights.

With it ComfyUI's own code computes everything around the transformer: schedules, latent scaling, the model's arguments
from a CONDITIONING and their defaults. A family is one entry of FAMILIES.
"""

from dataclasses import dataclass, field
from typing import Callable

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from ..backend.protocol import Loaded, RefusedError
from .latent_formats import LATENT_FORMATS


@dataclass(frozen=True)
class Family:
    """How ComfyUI builds a family from the diffusers config of its transformer.

    ``comfy_class``: config -> name of the class in comfy.supported_models. ``unet_config``: config -> ComfyUI's own.
    ``needs``: keys that a CONDITIONING must have. ``zeros``: model arguments for which ComfyUI's model takes zeros where a
    CONDITIONING has None, and the entry of unet_config with their width.
    """

    comfy_class: Callable[[dict], str]
    unet_config: Callable[[dict], dict]
    needs: tuple[str, ...] = ()
    zeros: dict[str, str] = field(default_factory=dict)


def _flux(config: dict) -> dict:
    return {
        "image_model": "flux", "patch_size": 2, "theta": 10000, "mlp_ratio": 4.0, "qkv_bias": True,
        "in_channels": config["in_channels"] // 4,  # diffusers counts the 2 x 2 latent cells of a token
        "out_channels": (config["out_channels"] or config["in_channels"]) // 4,
        "guidance_embed": config["guidance_embeds"],
        "vec_in_dim": config["pooled_projection_dim"],
        "context_in_dim": config["joint_attention_dim"],
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "num_heads": config["num_attention_heads"],
        "depth": config["num_layers"],
        "depth_single_blocks": config["num_single_layers"],
        "axes_dim": list(config["axes_dims_rope"]),
    }


FAMILIES = {
    "flux": Family(
        comfy_class=lambda config: "Flux" if config["guidance_embeds"] else "FluxSchnell",
        unet_config=_flux,
        needs=("pooled_output",),
        zeros={"y": "vec_in_dim"},
    ),
}


class _ElsewhereModule(torch.nn.Module):
    """Stands where ComfyUI expects the transformer, whose weights are on the ranks."""

    dtype = torch.bfloat16


def weightless_patcher(loaded: Loaded) -> comfy.model_patcher.ModelPatcher:
    """ComfyUI's ModelPatcher around its model object for a loaded transformer; RefusedError for an unknown family."""
    if loaded.family not in FAMILIES:
        raise RefusedError(f"the transformer's family is {loaded.family}, which these nodes do not know; they know {', '.join(FAMILIES)}.")
    family, config = FAMILIES[loaded.family], loaded.info["config"]
    model_config = getattr(comfy.supported_models, family.comfy_class(config))(
        {**family.unet_config(config), "disable_unet_model_creation": True})
    if loaded.info["latent_format"] is not None:
        model_config.latent_format = LATENT_FORMATS[loaded.info["latent_format"]]()
    model = model_config.get_model({})
    model.diffusion_model = _ElsewhereModule()
    management = comfy.model_management
    return comfy.model_patcher.ModelPatcher(model, management.get_torch_device(), management.unet_offload_device())
