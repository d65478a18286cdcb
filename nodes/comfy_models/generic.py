"""ComfyUI's model object for a transformer of which ComfyUI has none. Of one whose family has no entry:
schedules from the pipeline's scheduler, latent scaling from its VAE."""

from collections.abc import Sequence
from functools import partial

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.supported_models_base
import torch

#: Keys of a CONDITIONING -> the transformer's arguments, and how they are batched.
ARGUMENTS = {
    "cross_attn": ("c_crossattn", comfy.conds.CONDRegular),
    "pooled_output": ("y", comfy.conds.CONDRegular),
    "attention_mask": ("attention_mask", comfy.conds.CONDRegular),
    "image_slots": ("image_slots", comfy.conds.CONDConstant),
}
#: The backend's prediction -> ComfyUI's model type.
MODEL_TYPES = {
    "flow": comfy.model_base.ModelType.FLOW,
    "eps": comfy.model_base.ModelType.EPS,
    "v": comfy.model_base.ModelType.V_PREDICTION,
}


class VaeScaling(comfy.latent_formats.LatentFormat):
    """The scaling of latents that a diffusers VAE's configuration states: a scale and a shift, or a mean and
    a deviation of each channel."""

    def __init__(self, channels: int, dimensions: int, vae: dict):
        self.latent_channels = channels
        self.latent_dimensions = dimensions
        self.scale_factor = vae.get("scaling_factor") or 1.0
        self.mean = vae.get("latents_mean") or vae.get("shift_factor") or 0.0
        self.deviation = vae.get("latents_std") or 1.0

    def process_in(self, latent):
        """Scale the VAE's latent to the model's."""
        return (latent - _channels(self.mean, latent)) * self.scale_factor / _channels(self.deviation, latent)

    def process_out(self, latent):
        """Scale the model's latent to the VAE's."""
        return latent * _channels(self.deviation, latent) / self.scale_factor + _channels(self.mean, latent)


def _channels(values: float | Sequence[float], latent: torch.Tensor) -> float | torch.Tensor:
    """Return a number, or one for each channel, as it broadcasts to ``latent``."""
    if isinstance(values, (int, float)):
        return values
    return latent.new_tensor(values).view(-1, *[1] * (latent.ndim - 2))


class GenericModel(comfy.model_base.BaseModel):
    """Hands on the parts of a CONDITIONING that the transformer takes, and whatever it has of references."""

    def extra_conds(self, reference_latents=None, reference_latents_method=None, **kwargs):
        """Add those of the conditioning that the model accepts, and its reference latents."""
        conds = super().extra_conds(**kwargs)
        accepted = self.model_config.unet_config["accepted"]
        for key, (name, kind) in ARGUMENTS.items():
            if kwargs.get(key) is not None and name in accepted:
                conds[name] = kind(kwargs[key])
        if "guidance" in accepted:
            conds["guidance"] = comfy.conds.CONDRegular(torch.FloatTensor([kwargs.get("guidance", 3.5)]))
        if reference_latents is not None:
            latents = [self.process_latent_in(latent) for latent in reference_latents]
            conds["ref_latents"] = comfy.conds.CONDList(latents)
        if reference_latents_method is not None:
            conds["ref_latents_method"] = comfy.conds.CONDConstant(reference_latents_method)
        return conds


class GenericConfig(comfy.supported_models_base.BASE):
    """As the classes in comfy.supported_models. Its unet_config needs an entry ``accepted``: the arguments
    that the transformer takes."""

    unet_extra_config = {}
    kind = comfy.model_base.ModelType.FLOW

    def get_model(self, state_dict, prefix="", device=None):
        """Make ComfyUI's model object, without weights."""
        return GenericModel(self, self.kind, device=device)


def discrete_settings(start: float, end: float, kind: str, zero_terminal_snr: bool, steps: int) -> dict:
    """Return ComfyUI's sampling_settings of a noise schedule, by the names of backend's DiscreteSchedule."""
    return {
        "beta_schedule": kind,
        "linear_start": start,
        "linear_end": end,
        "timesteps": steps,
        "zsnr": zero_terminal_snr,
    }


def model_config(info: dict):
    """Return ComfyUI's description of a model, from Loaded.info of a fallback family."""
    scheduler = info["pipeline"].get("scheduler", {})
    vae = info["pipeline"].get("vae", {})
    latent_format = partial(VaeScaling, info["latent_channels"], info["latent_dimensions"], vae)
    settings = {"shift": scheduler.get("shift", 1.0)}
    if info["schedule"]:
        settings = discrete_settings(**info["schedule"])
    members = {
        "latent_format": staticmethod(latent_format),
        "sampling_settings": settings,
        "kind": MODEL_TYPES[info["prediction"]],
    }
    config = type("Generic", (GenericConfig,), members)
    return config({"disable_unet_model_creation": True, "accepted": info["conditioning"]})
