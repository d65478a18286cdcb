"""Inputs that the sampler nodes share."""

import comfy.samplers
from comfy_api.latest import io

from ...backend.protocol.solver_names import SOLVERS
from .schema import ParallelDiTType

DIT = ParallelDiTType.Input("dit", tooltip="The transformer, from Load Parallel DiT.")
SAMPLER_NAME = io.Combo.Input(
    "sampler_name", options=list(SOLVERS), default="euler", tooltip="The solver, as in KSampler."
)
POSITIVE = io.Conditioning.Input("positive", tooltip="What the image should show.")
NEGATIVE = io.Conditioning.Input(
    "negative", tooltip="What it should not show; unused where cfg is 1.0 (but by solvers with cfg_pp)."
)
LATENT = io.Latent.Input(
    "latent_image", tooltip="The latent to denoise: an empty one, or an encoded one for image to image."
)
OUTPUT = io.Latent.Output(display_name="latent", tooltip="The denoised latent, for VAE Decode.")


def cfg_input(default: float) -> io.Float.Input:
    """Return the input ``cfg``."""
    return io.Float.Input(
        "cfg",
        default=default,
        min=0.0,
        max=100.0,
        step=0.1,
        round=0.01,
        tooltip="Classifier-free guidance: how much the positive prompt is preferred to the negative one. "
        "1.0 skips the negative prompt, as guidance-distilled models (Flux) want it.",
    )


def ksampler_inputs(seed: str, cfg: float, scheduler: str) -> list:
    """Return the inputs of ComfyUI's KSamplers from the one named ``seed`` to the latent, with these defaults
    of the others."""
    return [
        io.Int.Input(
            seed,
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="The random seed of the noise; the same seed as in KSampler gives the same image (with a "
            "LoRA on a quantized file one near it).",
        ),
        io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Number of denoising steps."),
        cfg_input(cfg),
        SAMPLER_NAME,
        io.Combo.Input(
            "scheduler",
            options=list(comfy.samplers.SCHEDULER_NAMES),
            default=scheduler,
            tooltip="How the noise level falls from step to step, as in KSampler.",
        ),
        POSITIVE,
        NEGATIVE,
        LATENT,
    ]


def shift_input(note: str = "") -> io.Float.Input:
    """Return the input ``shift``, with ``note`` at the end of its tooltip."""
    return io.Float.Input(
        "shift",
        default=0.0,
        min=0.0,
        max=100.0,
        step=0.01,
        optional=True,
        tooltip=f"Moves the schedule of a flow model towards high noise levels; 0 = the model's own. The "
        f"number of the ModelSampling node of this model: of ModelSamplingFlux for FLUX.1 dev, "
        f"FLUX.2, Krea 2, Qwen-Image 2.1, LTX-Video and LTX-2 (there the logarithm), of "
        f"ModelSamplingSD3 or AuraFlow for others.{note}",
    )
