"""The ParallelSampler node: ComfyUI's KSampler with the step loop on the ranks."""

from comfy_api.latest import io

from .host import sampling_inputs as inputs
from .host.queued_checks import CheckedSampler
from .host.refusals import errors_on_node
from .host.remote_solver import sample_on_ranks
from .host.schema import ALIASES, schema


class ParallelSampler(CheckedSampler):
    """As KSampler, with a PARALLEL_DIT in place of a MODEL."""

    @classmethod
    def define_schema(cls):
        return schema(
            *ALIASES,
            node_id="ParallelSampler",
            reports=True,
            display_name="Parallel Sampler",
            description="KSampler with the denoising loop on several GPUs: same inputs, same latent unless "
            "PipeFusion is chosen, which drifts a little (method fastest exact excludes it). With a LoRA on "
            "a quantized file it is near KSampler's.",
            inputs=[
                inputs.DIT,
                *inputs.ksampler_inputs("seed", cfg=1.0, scheduler="simple"),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Less than 1.0 keeps the structure of latent_image, for image to image.",
                ),
                inputs.shift_input(),
            ],
            outputs=[inputs.OUTPUT],
        )

    @classmethod
    @errors_on_node()
    def execute(cls, dit, shift=0.0, **values) -> io.NodeOutput:
        return sample_on_ranks("KSampler", dit, shift, values)
