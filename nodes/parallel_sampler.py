"""The sampler nodes: ComfyUI's own KSampler, KSampler (Advanced) and SamplerCustomAdvanced, with the step
loop in a backend (remote_solver.py)."""

import comfy.patcher_extension
import comfy.samplers
from comfy_api.latest import io

from ..backend.protocol import RefusedError
from ..backend.protocol.solver_names import SOLVERS
from .comfy_models.registry import family_named
from .host.conditioning import check_conditioning
from .host.handle import make_no_room
from .host.remote_solver import RemoteSolver
from .host.shift import apply_shift
from .load_parallel_dit import ParallelDiTType, check_guidance, skips_negative

_SEED_TOOLTIP = "The random seed of the noise; the same seed as in KSampler gives the same picture."
_DIT = ParallelDiTType.Input("dit", tooltip="The transformer, from Load Parallel DiT.")
_STEPS = io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Number of denoising steps.")
_SAMPLER_NAME = io.Combo.Input(
    "sampler_name", options=list(SOLVERS), default="euler", tooltip="The solver, as in KSampler."
)
_POSITIVE = io.Conditioning.Input("positive", tooltip="What the picture should show.")
_NEGATIVE = io.Conditioning.Input("negative", tooltip="What it should not show; unused where cfg is 1.0.")
_LATENT = io.Latent.Input(
    "latent_image", tooltip="The latent to denoise: an empty one, or a picture's for image to image."
)
#: Scale of a model's latents -> ComfyUI's node that makes empty ones.
_EMPTY = {16: "EmptyFlux2LatentImage", 32: "EmptyHunyuanImageLatent"}
_OUTPUT = io.Latent.Output(display_name="latent", tooltip="The denoised latent, for VAE Decode.")


def _cfg(default: float):
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


def _scheduler(default: str):
    return io.Combo.Input(
        "scheduler",
        options=list(comfy.samplers.SCHEDULER_NAMES),
        default=default,
        tooltip="How the noise level falls from step to step, as in KSampler.",
    )


def _shift(note: str = ""):
    return io.Float.Input(
        "shift",
        default=0.0,
        min=0.0,
        max=100.0,
        step=0.01,
        optional=True,
        tooltip=f"Moves the schedule of a flow model towards high noise levels; 0 = the model's own. The "
        f"number of the ModelSampling node of this model: of ModelSamplingFlux for FLUX.1 dev, "
        f"FLUX.2, Krea 2, LTX-Video and LTX-2 (there the logarithm), of ModelSamplingSD3 or "
        f"AuraFlow for others.{note}",
    )


class ParallelSampler(io.ComfyNode):
    """As KSampler, with a PARALLEL_DIT in place of a MODEL."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ParallelSampler",
            display_name="Parallel Sampler",
            category="parallel",
            description="KSampler with the denoising loop on several GPUs: same inputs, same latent.",
            inputs=[
                _DIT,
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip=_SEED_TOOLTIP,
                ),
                _STEPS,
                _cfg(1.0),
                _SAMPLER_NAME,
                _scheduler("simple"),
                _POSITIVE,
                _NEGATIVE,
                _LATENT,
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Less than 1.0 keeps the structure of latent_image, for image to image.",
                ),
                _shift(),
            ],
            outputs=[_OUTPUT],
        )

    @classmethod
    def execute(
        cls,
        dit,
        seed,
        steps,
        cfg,
        sampler_name,
        scheduler,
        positive,
        negative,
        latent_image,
        denoise,
        shift=0.0,
    ) -> io.NodeOutput:
        from . import KSampler  # ComfyUI's own module, whole only once every pack is imported

        negative = _check(dit, cfg, sampler_name, positive, negative, latent_image)
        model, _ = _remote_model(dit, sampler_name, shift)
        return io.NodeOutput(
            *KSampler().sample(
                model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise
            )
        )


class ParallelSamplerAdvanced(io.ComfyNode):
    """As KSampler (Advanced), with a PARALLEL_DIT in place of a MODEL."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ParallelSamplerAdvanced",
            display_name="Parallel Sampler (Advanced)",
            category="parallel",
            description="KSampler (Advanced) with the denoising loop on several GPUs: a part of the steps, "
            "for models in two stages.",
            inputs=[
                _DIT,
                io.Combo.Input(
                    "add_noise",
                    options=["enable", "disable"],
                    default="enable",
                    tooltip="disable where latent_image brings its noise, from the stage before.",
                ),
                io.Int.Input(
                    "noise_seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip=_SEED_TOOLTIP,
                ),
                _STEPS,
                _cfg(8.0),
                _SAMPLER_NAME,
                _scheduler(comfy.samplers.SCHEDULER_NAMES[0]),
                _POSITIVE,
                _NEGATIVE,
                _LATENT,
                io.Int.Input(
                    "start_at_step",
                    default=0,
                    min=0,
                    max=10000,
                    tooltip="The first of the steps that are done here.",
                ),
                io.Int.Input(
                    "end_at_step", default=10000, min=0, max=10000, tooltip="The step before which to end."
                ),
                io.Combo.Input(
                    "return_with_leftover_noise",
                    options=["disable", "enable"],
                    default="disable",
                    tooltip="enable where another stage goes on from end_at_step.",
                ),
                _shift(),
            ],
            outputs=[_OUTPUT],
        )

    @classmethod
    def execute(
        cls,
        dit,
        add_noise,
        noise_seed,
        steps,
        cfg,
        sampler_name,
        scheduler,
        positive,
        negative,
        latent_image,
        start_at_step,
        end_at_step,
        return_with_leftover_noise,
        shift=0.0,
    ) -> io.NodeOutput:
        from . import KSamplerAdvanced

        negative = _check(dit, cfg, sampler_name, positive, negative, latent_image)
        model, _ = _remote_model(dit, sampler_name, shift)
        return io.NodeOutput(
            *KSamplerAdvanced().sample(
                model,
                add_noise,
                noise_seed,
                steps,
                cfg,
                sampler_name,
                scheduler,
                positive,
                negative,
                latent_image,
                start_at_step,
                end_at_step,
                return_with_leftover_noise,
            )
        )


class ParallelSamplerCustom(io.ComfyNode):
    """As SamplerCustomAdvanced with CFGGuider, with a PARALLEL_DIT in place of a MODEL."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ParallelSamplerCustom",
            display_name="Parallel Sampler (Custom)",
            category="parallel",
            description="The custom sampler with the denoising loop on several GPUs: noise from a NOISE "
            "node, any SIGMAS.",
            inputs=[
                _DIT,
                io.Noise.Input(
                    "noise", tooltip="From RandomNoise, or DisableNoise where latent_image brings its noise."
                ),
                _cfg(1.0),
                _SAMPLER_NAME,
                io.Sigmas.Input(
                    "sigmas",
                    tooltip="The noise levels, from any scheduler node. Those that need a MODEL take "
                    "Parallel Model's.",
                ),
                _POSITIVE,
                _NEGATIVE,
                _LATENT,
                _shift(
                    " sigmas come as they are: here it is the shift that they were made with, on which "
                    "ranges of a prompt and the first step of SDE solvers depend."
                ),
            ],
            outputs=[
                io.Latent.Output(
                    display_name="output",
                    tooltip="The latent after the last step, for VAE Decode or another sampler.",
                ),
                io.Latent.Output(
                    display_name="denoised_output",
                    tooltip="The model's prediction of the picture in the last step.",
                ),
            ],
        )

    @classmethod
    def execute(
        cls, dit, noise, cfg, sampler_name, sigmas, positive, negative, latent_image, shift=0.0
    ) -> io.NodeOutput:
        from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced

        negative = _check(dit, cfg, sampler_name, positive, negative, latent_image)
        model, remote = _remote_model(dit, sampler_name, shift)
        remote.wants_denoised = True
        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
        return SamplerCustomAdvanced.execute(
            noise, guider, comfy.samplers.sampler_object(sampler_name), sigmas, latent_image
        )


def _check(dit, cfg: float, sampler_name: str, positive: list, negative: list, latent: dict) -> list:
    """RefusedError or ConfigError for what the ranks cannot sample; the negative prompt to use, which where
    it is skipped holds nothing that matters."""
    check_guidance(cfg, sampler_name, dit.config)
    name, family = dit.loaded.family, family_named(dit.loaded)
    check_conditioning("positive", positive, name, family)
    if skips_negative(cfg, sampler_name):
        negative = positive
    check_conditioning("negative", negative, name, family)
    _check_latent(latent, dit.patcher.model.latent_format, family.latents)
    dit.config.check_batch(latent["samples"].shape[0])
    return negative


def _remote_model(dit, sampler_name: str, shift: float):
    """(a MODEL whose solver runs on the ranks, that solver)."""
    model, remote = dit.patcher.clone(), RemoteSolver(dit, sampler_name)
    model.add_wrapper(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE, remote)
    comfy.patcher_extension.add_wrapper(
        comfy.patcher_extension.WrappersMP.PREPARE_SAMPLING,
        make_no_room,
        model.model_options,
        is_model_options=True,
    )
    apply_shift(model, shift, dit.loaded.family, family_named(dit.loaded))
    return model, remote


def _check_latent(latent: dict, latent_format, nested: tuple[int, ...]):
    """RefusedError for a LATENT of another model; ComfyUI gives an empty one the right channels, and latents
    beside it, by itself.

    ``nested``: channels of the latents, where the transformer takes several.
    """
    samples = latent["samples"]
    if samples.is_nested:
        channels = tuple(part.shape[1] for part in samples.unbind())
        if not nested:
            raise RefusedError(
                "latent_image holds several latents (video and audio), but this transformer takes one."
            )
        if channels != nested:
            raise RefusedError(
                f"latent_image holds latents of {channels} channels, but this transformer takes {nested}; "
                f"make them with this model's own empty-latent node."
            )
        return
    if nested and samples.any():
        raise RefusedError(
            f"latent_image is one latent, but this transformer takes {len(nested)} (video and audio); make "
            f"them with this model's own nodes."
        )
    shapes = {2: (4,), 3: (4, 5)}[latent_format.latent_dimensions]
    wanted = latent_format.latent_channels
    if samples.ndim not in shapes or (samples.shape[1] != wanted and samples.any()):
        raise RefusedError(
            f"latent_image has the shape {list(samples.shape)}, but this transformer takes [batch, "
            f"{wanted}, height, width]; encode the picture with the VAE of this model."
        )
    scale = getattr(latent_format, "spacial_downscale_ratio", 8)
    if (
        scale in _EMPTY
        and samples.shape[1] in (4, 16)
        and samples.shape[1] != wanted
        and "downscale_ratio_spacial" not in latent
    ):
        raise RefusedError(
            f"latent_image is an empty latent at 1/8 of the picture's size, but this transformer's are at "
            f"1/{scale}, and this ComfyUI does not scale it; make it with {_EMPTY[scale]}."
        )
