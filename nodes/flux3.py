"""FLUX.3 as ComfyUI would have it: flow matching with its own constant shift, and the latents of FLUX.2, whose VAE it shares."""

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.supported_models_base


class Flux3Model(comfy.model_base.BaseModel):
    """Argument: eight layers of Qwen3-VL's hidden states side by side."""

    def extra_conds(self, **kwargs):
        prompt = kwargs.get("cross_attn", None)
        return {**super().extra_conds(**kwargs), **({} if prompt is None else {"c_crossattn": comfy.conds.CONDRegular(prompt)})}


class Flux3(comfy.supported_models_base.BASE):
    """As the classes in comfy.supported_models."""

    unet_config = {"image_model": "flux3"}
    unet_extra_config = {}
    sampling_settings = {"shift": 6.93}
    latent_format = comfy.latent_formats.Flux2

    def get_model(self, state_dict, prefix="", device=None):
        return Flux3Model(self, comfy.model_base.ModelType.FLOW, device=device)
