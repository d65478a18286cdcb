"""The solver's loop of ComfyUI's samplers, run by the ranks. ComfyUI's own sampling code computes noise,
schedule, masks, conditioning and latent scaling, as for any model; a wrapper around its innermost call, the
solver's loop over steps, hands that loop's inputs to the ranks instead."""

import importlib
from functools import partial

import comfy.model_management
import comfy.model_patcher
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy.patcher_extension import WrappersMP, add_wrapper
from comfy_api.latest import io
from comfy_execution.utils import get_executing_context

from ...backend.protocol import Sample
from ...backend.protocol.solver_names import HALF_LOG_SNR, PERCENTS
from ..comfy_models.registry import family_named
from . import one_rank, refusals
from .auto_plan import sample_planned
from .conditioning import fill_zeros, latent_shapes, limits_and_weight, model_arguments
from .guidance import skips_negative
from .handle import ParallelDiT, ensure_loaded
from .models_on_ranks import keep_rank_weights, run_evicting_models
from .progress import CANCELLING, Reporter, interrupt
from .report import run_lines, shown
from .sampling_checks import check_inputs
from .shift import apply_shift

#: The latest run, for the side panel: queued prompt, node, degrees, steps, seconds.
LATEST_RUN: dict = {}
#: Least seconds between two previews; each costs a gather of the latent to rank 0.
PREVIEW_SECONDS = 0.2


class RemoteSolver:
    """Called by ComfyUI in place of a solver's ``sample``: the same inputs, the same result, computed by the
    ranks. ``wants_denoised``: the last progress callback gets the last step's prediction of the whole batch,
    as ComfyUI's own solvers give it; without it callbacks get the latest preview, and the noise where there
    is none yet."""

    def __init__(self, dit: ParallelDiT, sampler_name: str):
        self.dit = dit
        self.sampler_name = sampler_name
        self.wants_denoised = False
        self.backend, self.loaded = ensure_loaded(dit)
        #: How the last run went.
        self.lines: list[str] = []

    def __call__(
        self, executor, guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar
    ):
        """Run the solver's loop on the ranks: noise, latent_image (B, C, [T,] H, W), or several packed (B, 1,
        L), in the model's latent space -> samples likewise. ``executor``: ComfyUI's own loop."""
        if len(sigmas) < 2:  # no step: it scales the latent and asks nothing of the model
            return executor(
                guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar
            )
        request = self._request(guider, sigmas, extra_args["seed"], noise, latent_image, denoise_mask)
        steps = len(sigmas) - 1
        last = self.wants_denoised
        with Reporter(callback, noise, steps, disable_pbar, last, self.backend) as reporter:
            interrupted = partial(reporter.status.interrupted, backend=self.backend)
            sample = partial(self.backend.sample, request, reporter, interrupted, leaves=True)
            check = partial(reporter.status.check, CANCELLING, self.backend)
            result = run_evicting_models(self.backend, self.dit.choice, sample, check)
            if result is None:
                raise interrupt()
            samples = result.tensors["samples"].to(noise.device)
            if self.wants_denoised:
                reporter.last(result.tensors["denoised"].to(noise.device), samples)
            notes = result.stats.get("notes", [])
            self.lines = [*self._report(request, steps, result.stats["seconds"]), *notes]
            reporter.status.show("\n".join(self.lines))
        return samples

    def _report(self, request: Sample, steps: int, seconds: float) -> list[str]:
        """Return how the run went, against one rank where that has run before; note it if it is one."""
        context = get_executing_context()
        where = (context.prompt_id, context.node_id) if context else (None, None)
        degrees = self.dit.config.degrees
        LATEST_RUN.update(zip(("prompt", "node"), where), degrees=degrees, steps=steps, seconds=seconds)
        refusals.note_success()
        device = self.loaded.info["device"]
        digest = one_rank.key(self.dit, request, device)
        if self.dit.config.world_size == 1:
            one_rank.note_seconds(digest, seconds / steps)
        before = one_rank.least_seconds(digest)
        projected = one_rank.projected_speedup(digest, self.dit, request) if before is None else None
        is_auto = self.dit.auto is not None
        return run_lines(self.dit.config, steps, seconds, device, before, projected, is_auto)

    def _request(self, guider, sigmas, seed, noise, latent_image, denoise_mask) -> Sample:
        prompts, conditioning = self._prompts(guider, noise)
        tensors = {"noise": noise, "latent": latent_image, "sigmas": sigmas, **conditioning}
        if denoise_mask is not None:
            family_named(self.loaded).check_mask(denoise_mask)
            tensors["denoise_mask"] = denoise_mask
        if self.sampler_name in HALF_LOG_SNR:
            percent_to_sigma = guider.inner_model.model_sampling.percent_to_sigma
            tensors["percent_sigmas"] = torch.tensor(
                [percent_to_sigma(percent) for percent in PERCENTS], dtype=torch.float64
            )
        return Sample(
            model=self.loaded.model,
            sampler=self.sampler_name,
            cfg=float(guider.cfg),
            seed=seed,
            denoised=self.wants_denoised,
            prompts=prompts,
            preview_seconds=0.0 if args.preview_method == LatentPreviewMethod.NoPreviews else PREVIEW_SECONDS,
            latent_shapes=latent_shapes(guider.conds["positive"][0]),
            tensors=tensors,
            **self.dit.config.per_request,
        )

    def _prompts(self, guider, noise: torch.Tensor) -> tuple[dict[str, dict], dict[str, torch.Tensor]]:
        """Return Sample.prompts and their tensors."""
        family = family_named(self.loaded)
        config = self.loaded.info["config"]
        accepted = self.loaded.info["conditioning"]
        batch = noise.shape[0]
        branches = ["positive"] if skips_negative(guider.cfg, self.sampler_name) else ["positive", "negative"]
        conds = [
            (branch, index, cond) for branch in branches for index, cond in enumerate(guider.conds[branch])
        ]
        prompts = {}
        tensors = {}
        for branch, index, cond in conds:
            name = f"{branch}{index + 1}" if index else branch
            others = [other for _, _, other in conds if other is not cond]
            other = others[0] if len(others) == 1 else None
            arguments = model_arguments(branch, cond, batch, accepted, family, other)
            for key, value in fill_zeros(arguments, batch, family, config).items():
                tensors[f"{name}.{key}"] = value
            prompts[name], weight = limits_and_weight(cond, noise)
            if weight is not None:
                tensors[f"weight.{name}"] = weight
        return prompts, tensors


def model_on_ranks(
    dit: ParallelDiT, sampler_name: str, shift: float
) -> tuple[comfy.model_patcher.ModelPatcher, RemoteSolver]:
    """Return a MODEL whose solver runs on the ranks, and that solver. Errors as in ``handle.load``."""
    model = dit.patcher.clone()
    remote = RemoteSolver(dit, sampler_name)
    model.add_wrapper(WrappersMP.SAMPLER_SAMPLE, remote)
    add_wrapper(WrappersMP.PREPARE_SAMPLING, keep_rank_weights, model.model_options, is_model_options=True)
    apply_shift(model, shift, dit.loaded.family, family_named(dit.loaded))
    return model, remote


def sample_on_ranks(node: str, dit: ParallelDiT, shift: float, inputs: dict) -> io.NodeOutput:
    """Run ComfyUI's own sampler node of that name with the solver on the ranks. ``inputs``: those of
    ComfyUI's node, without its ``model``. Errors as in ``handle.load``."""
    sampler = getattr(importlib.import_module("nodes"), node)()  # whole only once every pack is imported
    cfg = inputs["cfg"]
    sampler_name = inputs["sampler_name"]
    positive = inputs["positive"]
    latent = inputs["latent_image"]
    inputs["negative"] = check_inputs(dit, cfg, sampler_name, positive, inputs["negative"], latent)
    steps = min(inputs.get("end_at_step", inputs["steps"]), inputs["steps"]) - inputs.get("start_at_step", 0)

    def sample(dit: ParallelDiT) -> io.NodeOutput:
        model, remote = model_on_ranks(dit, sampler_name, shift)
        with remote.backend.in_use():
            samples = sampler.sample(model=model, **inputs)
        return io.NodeOutput(*samples, ui=shown([*dit.lines[:1], *remote.lines]))

    return sample_planned(dit, steps, cfg, sampler_name, positive, latent, sample)
