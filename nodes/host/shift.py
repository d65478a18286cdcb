"""The ``shift`` input: what ComfyUI's ModelSampling nodes do, for a PARALLEL_DIT's model object."""

import math

import comfy.model_patcher
import comfy.model_sampling

from ...backend.protocol import RefusedError
from ..comfy_models.registry import ComfyFamily


def apply_shift(model: comfy.model_patcher.ModelPatcher, shift: float, family_name: str, family: ComfyFamily):
    """Set the shift of ``model``'s noise levels through ComfyUI's own classes. ``model`` is a clone; a shift
    of 0 keeps the model's own.

    The number means what it means in the ModelSampling node of this family. In ModelSamplingSD3 and
    ModelSamplingAuraFlow, sigma = shift · t / (1 + (shift - 1) · t). In ModelSamplingFlux it is the logarithm
    of that shift. Raises RefusedError for models that are no flow models.
    """
    if shift == 0:
        return
    if not math.isfinite(shift):
        raise RefusedError(f"shift is {shift}, which is no number; use one from 0 (the model's own) to 100.")
    own = model.get_model_object("model_sampling")
    kinds = comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.ModelSamplingDiscreteFlow
    if not isinstance(own, comfy.model_sampling.CONST) or not isinstance(own, kinds):
        raise RefusedError(
            f"shift is {shift:g}, but {family_name} is not a flow model: its noise levels are fixed by its "
            f"training; set shift to 0."
        )
    if hasattr(own, "audio_shift"):
        raise RefusedError(
            f"shift is {shift:g}, but the audio of {family_name} has a schedule of its own next to the "
            f"video's, which one shift does not set; set shift to 0."
        )
    exponential = isinstance(own, kinds[0]) and not family.linear_shift

    class ModelSampling(kinds[0] if exponential else kinds[1], comfy.model_sampling.CONST):
        """As ComfyUI's nodes make it."""

    shifted = ModelSampling(model.model.model_config)
    more = {} if exponential else {"multiplier": getattr(own, "multiplier", 1.0)}
    shifted.set_parameters(shift=shift, **more)
    model.add_object_patch("model_sampling", shifted)
