"""The ParallelSamplerCustom node: ComfyUI's SamplerCustomAdvanced with the step loop on the ranks."""

import comfy.samplers
from comfy_api.latest import io

from .host import sampling_inputs as inputs
from .host.auto_plan import sample_planned
from .host.queued_checks import CheckedSampler
from .host.refusals import errors_on_node
from .host.remote_solver import model_on_ranks
from .host.report import shown
from .host.sampling_checks import check_inputs
from .host.schema import ALIASES, schema


class ParallelSamplerCustom(CheckedSampler):
    """As SamplerCustomAdvanced with CFGGuider, with a PARALLEL_DIT in place of a MODEL."""

    @classmethod
    def define_schema(cls):
        return schema(
            *ALIASES,
            node_id="ParallelSamplerCustom",
            reports=True,
            display_name="Parallel Sampler (Custom)",
            description="The custom sampler with the denoising loop on several GPUs: noise from a NOISE "
            "node, any SIGMAS.",
            inputs=[
                inputs.DIT,
                io.Noise.Input(
                    "noise", tooltip="From RandomNoise, or DisableNoise where latent_image brings its noise."
                ),
                inputs.cfg_input(1.0),
                inputs.SAMPLER_NAME,
                io.Sigmas.Input(
                    "sigmas",
                    tooltip="The noise levels, from any scheduler node. Those that need a MODEL take "
                    "Parallel Model's.",
                ),
                inputs.POSITIVE,
                inputs.NEGATIVE,
                inputs.LATENT,
                inputs.shift_input(
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
                    tooltip="The model's prediction of the image in the last step.",
                ),
            ],
        )

    @classmethod
    @errors_on_node()
    def execute(
        cls, dit, noise, cfg, sampler_name, sigmas, positive, negative, latent_image, shift=0.0
    ) -> io.NodeOutput:
        from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced

        negative = check_inputs(dit, cfg, sampler_name, positive, negative, latent_image)

        def sample(dit) -> io.NodeOutput:
            model, remote = model_on_ranks(dit, sampler_name, shift)
            remote.wants_denoised = True
            guider = comfy.samplers.CFGGuider(model)
            guider.set_conds(positive, negative)
            guider.set_cfg(cfg)
            solver = comfy.samplers.sampler_object(sampler_name)
            with remote.backend.in_use():
                output = SamplerCustomAdvanced.execute(noise, guider, solver, sigmas, latent_image)
            return io.NodeOutput(*output.args, ui=shown([*dit.lines[:1], *remote.lines]))

        steps = len(sigmas) - 1
        return sample_planned(dit, steps, cfg, sampler_name, positive, latent_image, sample)
