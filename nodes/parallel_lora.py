"""The ParallelLoRA node: a LoRA, added to a transformer that a backend holds."""

import math
import os

import folder_paths
from comfy_api.latest import io

from ..backend.protocol import RefusedError
from .host.handle import ParallelDiT, with_lora
from .host.progress import node_text
from .host.refusals import errors_on_node
from .host.report import lora_line, shown
from .host.schema import ALIASES, ParallelDiTType, schema


class ParallelLoRA(io.ComfyNode):
    """PARALLEL_DIT + a file of models/loras -> PARALLEL_DIT; as LoraLoaderModelOnly."""

    @classmethod
    def define_schema(cls):
        return schema(
            *ALIASES,
            "lora",
            node_id="ParallelLoRA",
            reports=True,
            display_name="Parallel LoRA",
            description="Adds a LoRA to a transformer that is loaded on several ranks. Chain several of "
            "these nodes to add several.",
            inputs=[
                ParallelDiTType.Input(
                    "dit", tooltip="The transformer, from Load Parallel DiT or another Parallel LoRA."
                ),
                io.Combo.Input(
                    "lora_name",
                    options=folder_paths.get_filename_list("loras"),
                    tooltip="A .safetensors file in models/loras, with keys as ComfyUI, kohya, diffusers, "
                    "PEFT or LyCORIS write them.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How much of the LoRA is added; 0 adds nothing, negative values subtract it.",
                ),
            ],
            outputs=[
                ParallelDiTType.Output(
                    display_name="dit",
                    tooltip="For Parallel Sampler, Parallel Model or another Parallel LoRA. The "
                    "transformer without the LoRA stays usable too.",
                )
            ],
        )

    @classmethod
    @errors_on_node()
    def execute(cls, dit, lora_name, strength) -> io.NodeOutput:
        if not math.isfinite(strength):
            raise RefusedError(f"strength is {strength}; use a number.")
        if strength == 0:
            return _reported(dit, "strength 0: nothing is added")
        path = folder_paths.get_full_path("loras", lora_name)
        if path is None:
            raise RefusedError(
                f"lora_name is {lora_name!r}, which is no file in models/loras; put it there and refresh "
                f"the page."
            )
        changed = with_lora(dit, os.path.abspath(path), strength)
        return _reported(changed, lora_line(dit.loaded.info, changed.loaded.info, changed.config))


def _reported(dit: ParallelDiT, line: str) -> io.NodeOutput:
    """Return a node's output with ``line`` under it: the page would keep the one before, were none given."""
    node_text()(line)
    return io.NodeOutput(dit, ui=shown([line]))
