"""FLUX.3 as ComfyUI would have it: flow matching with its own constant shift, and the latents of FLUX.2,
whose VAE it shares."""

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.supported_models_base


class Flux3Model(comfy.model_base.BaseModel):
    """Arguments: eight layers of Qwen3-VL's hidden states, concatenated, and reference latents."""

    def extra_conds(self, **kwargs):
        return super().extra_conds(**kwargs) | text_and_references(self, **kwargs)


def text_and_references(
    model, /, cross_attn=None, reference_latents=None, reference_latents_method=None, **_
) -> dict:
    """Return the arguments of a prompt's hidden states and of reference latents, those that are there."""
    found = {}
    if cross_attn is not None:
        found["c_crossattn"] = comfy.conds.CONDRegular(cross_attn)
    if reference_latents is not None:
        latents = [model.process_latent_in(latent) for latent in reference_latents]
        found["ref_latents"] = comfy.conds.CONDList(latents)
    if reference_latents_method is not None:
        found["ref_latents_method"] = comfy.conds.CONDConstant(reference_latents_method)
    return found


class Flux3(comfy.supported_models_base.BASE):
    """As the classes in comfy.supported_models."""

    unet_config = {"image_model": "flux3"}
    unet_extra_config = {}
    sampling_settings = {"shift": 6.93}
    latent_format = comfy.latent_formats.Flux2

    def get_model(self, state_dict, prefix="", device=None):
        return Flux3Model(self, comfy.model_base.ModelType.FLOW, device=device)
