"""The ParallelSamplerAdvanced node: ComfyUI's KSampler (Advanced) with the step loop on the ranks."""

import comfy.samplers
from comfy_api.latest import io

from .host import sampling_inputs as inputs
from .host.queued_checks import CheckedSampler
from .host.refusals import errors_on_node
from .host.remote_solver import sample_on_ranks
from .host.schema import ALIASES, schema


class ParallelSamplerAdvanced(CheckedSampler):
    """As KSampler (Advanced), with a PARALLEL_DIT in place of a MODEL."""

    @classmethod
    def define_schema(cls):
        return schema(
            *ALIASES,
            node_id="ParallelSamplerAdvanced",
            reports=True,
            display_name="Parallel Sampler (Advanced)",
            description="KSampler (Advanced) with the denoising loop on several GPUs: a part of the steps, "
            "for models in two stages.",
            inputs=[
                inputs.DIT,
                io.Combo.Input(
                    "add_noise",
                    options=["enable", "disable"],
                    default="enable",
                    tooltip="disable where latent_image brings its noise, from the stage before.",
                ),
                *inputs.ksampler_inputs("noise_seed", cfg=8.0, scheduler=comfy.samplers.SCHEDULER_NAMES[0]),
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
                inputs.shift_input(),
            ],
            outputs=[inputs.OUTPUT],
        )

    @classmethod
    @errors_on_node()
    def execute(cls, dit, shift=0.0, **values) -> io.NodeOutput:
        return sample_on_ranks("KSamplerAdvanced", dit, shift, values)
