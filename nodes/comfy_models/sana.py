"""SANA as ComfyUI would have it: flow matching with a shift of 3, latents of DC-AE (32 channels, 1/32 of the
image's size)."""

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.supported_models_base


class SanaLatent(comfy.latent_formats.LatentFormat):
    """The scaling of DC-AE f32c32."""

    latent_channels = 32
    scale_factor = 0.41407
    spacial_downscale_ratio = 32


class SanaModel(comfy.model_base.BaseModel):
    """Arguments: the prompt's hidden states, and which of its tokens are no padding."""

    def extra_conds(self, **kwargs):
        found = super().extra_conds(**kwargs)
        for name, key in (("c_crossattn", "cross_attn"), ("attention_mask", "attention_mask")):
            if kwargs.get(key) is not None:
                found[name] = comfy.conds.CONDRegular(kwargs[key])
        return found


class Sana(comfy.supported_models_base.BASE):
    """As the classes in comfy.supported_models."""

    unet_config = {"image_model": "sana"}
    unet_extra_config = {}
    sampling_settings = {"shift": 3.0}
    latent_format = SanaLatent

    def get_model(self, state_dict, prefix="", device=None):
        return SanaModel(self, comfy.model_base.ModelType.FLOW, device=device)
