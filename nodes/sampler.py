"""The ParallelSampler node: ComfyUI's own KSampler, with the step loop in a backend.

common_ksampler computes noise, schedule, masks, conditioning, latent scaling, progress and previews, as for any model. A
wrapper around its innermost call, the solver's loop over steps, hands that loop's inputs to the ranks instead.
"""

import comfy.model_management
import comfy.patcher_extension
import comfy.samplers
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy_api.latest import io

from ..backend.protocol import Progress, RefusedError, Sample
from ..backend.solver_names import HALF_LOG_SNR, PERCENTS, SOLVERS
from .conditioning import check_conditioning, fill_zeros, model_arguments
from .families import FAMILIES
from .handle import ParallelDiT, ensure_loaded
from .load import ParallelDiTType, check_guidance, skips_negative

#: Least seconds between two previews; each costs a gather of the latent to rank 0.
PREVIEW_SECONDS = 0.2


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
                ParallelDiTType.Input("dit", tooltip="The transformer, from Load Parallel DiT."),
                io.Int.Input("seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=True, tooltip="The random seed of the noise; the same seed as in KSampler gives the same picture."),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Number of denoising steps."),
                io.Float.Input("cfg", default=1.0, min=0.0, max=100.0, step=0.1, round=0.01, tooltip="Classifier-free guidance: how much the positive prompt is preferred to the negative one. 1.0 skips the negative prompt, as guidance-distilled models (Flux) want it."),
                io.Combo.Input("sampler_name", options=list(SOLVERS), default="euler", tooltip="The solver, as in KSampler."),
                io.Combo.Input("scheduler", options=list(comfy.samplers.SCHEDULER_NAMES), default="simple", tooltip="How the noise level falls from step to step, as in KSampler."),
                io.Conditioning.Input("positive", tooltip="What the picture should show."),
                io.Conditioning.Input("negative", tooltip="What it should not show; unused where cfg is 1.0."),
                io.Latent.Input("latent_image", tooltip="The latent to denoise: an empty one, or a picture's for image to image."),
                io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="Less than 1.0 keeps the structure of latent_image, for image to image."),
            ],
            outputs=[io.Latent.Output(display_name="latent", tooltip="The denoised latent, for VAE Decode.")],
        )

    @classmethod
    def execute(cls, dit, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise) -> io.NodeOutput:
        from nodes import common_ksampler  # ComfyUI's own module, whole only once every pack is imported

        check_guidance(cfg, sampler_name, dit.config)
        family = FAMILIES[dit.loaded.family]
        check_conditioning("positive", positive, dit.loaded.family, family)
        if skips_negative(cfg, sampler_name):
            negative = positive  # never computed; whatever it holds cannot matter
        check_conditioning("negative", negative, dit.loaded.family, family)
        _check_latent(latent_image, dit.patcher.model.latent_format)
        dit.config.check_batch(latent_image["samples"].shape[0])
        model = dit.patcher.clone()
        model.add_wrapper(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE, _RemoteSolver(dit, sampler_name))
        return io.NodeOutput(*common_ksampler(model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=denoise))


class _RemoteSolver:
    """Called by ComfyUI in place of a solver's ``sample``: the same inputs, the same answer, computed by the ranks."""

    def __init__(self, dit: ParallelDiT, sampler_name: str):
        self.dit = dit
        self.sampler_name = sampler_name
        self.backend, self.loaded = ensure_loaded(dit)

    def __call__(self, executor, guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar):
        """noise, latent_image (B, C, [T,] H, W) in the model's latent space -> samples likewise. ``executor``: not called."""
        tensors = {"noise": noise, "latent": latent_image, "sigmas": sigmas, **self._conditioning(guider, noise.shape[0])}
        if denoise_mask is not None:
            tensors["denoise_mask"] = denoise_mask
        if self.sampler_name in HALF_LOG_SNR:
            percent_to_sigma = guider.inner_model.model_sampling.percent_to_sigma
            tensors["percent_sigmas"] = torch.tensor([percent_to_sigma(percent) for percent in PERCENTS], dtype=torch.float64)
        config = self.dit.config
        request = Sample(
            model=self.loaded.model, sampler=self.sampler_name, cfg=float(guider.cfg), seed=extra_args["seed"],
            num_pipeline_patch=config.num_pipeline_patch, warmup_steps=config.warmup_steps, stale_kv=config.stale_kv, attention=config.attention,
            preview_seconds=0.0 if args.preview_method == LatentPreviewMethod.NoPreviews else PREVIEW_SECONDS, tensors=tensors)
        management = comfy.model_management
        result = self.backend.sample(request, _Reporter(callback, noise), management.processing_interrupted)
        if result is None:
            management.throw_exception_if_processing_interrupted()
            raise management.InterruptProcessingException()
        return result.tensors["samples"].to(noise.device)

    def _conditioning(self, guider, batch: int) -> dict[str, torch.Tensor]:
        family, unet_config = FAMILIES[self.loaded.family], guider.inner_model.model_config.unet_config
        tensors = {}
        for name in ["positive"] if skips_negative(guider.cfg, self.sampler_name) else ["positive", "negative"]:
            arguments = model_arguments(name, guider.conds[name], batch, self.loaded.info["conditioning"])
            for key, value in fill_zeros(arguments, batch, family, unet_config).items():
                tensors[f"{name}.{key}"] = value
        return tensors


class _Reporter:
    """Progress of the ranks -> ComfyUI's callback, which draws the bar and the preview and raises on an interrupt."""

    def __init__(self, callback, noise: torch.Tensor):
        self.callback = callback
        self.latest = noise

    def __call__(self, progress: Progress):
        if "x0" in progress.tensors:
            self.latest = progress.tensors["x0"].to(self.latest.device)
        self.callback(progress.step - 1, self.latest, self.latest, progress.total)


def _check_latent(latent: dict, latent_format):
    """RefusedError for a LATENT of another model; ComfyUI gives an empty one the right channels by itself."""
    samples = latent["samples"]
    if samples.is_nested:
        raise RefusedError("latent_image holds several latents (video and audio), but this transformer takes one.")
    shapes = {2: (4,), 3: (4, 5)}[latent_format.latent_dimensions]
    wanted = latent_format.latent_channels
    if samples.ndim not in shapes or (samples.shape[1] != wanted and samples.any()):
        raise RefusedError(f"latent_image has the shape {list(samples.shape)}, but this transformer takes [batch, {wanted}, height, width]; encode the picture with the VAE of this model.")
