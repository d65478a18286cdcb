"""The LoadParallelDiT node: a transformer, loaded in a backend of several ranks."""

import os
from collections.abc import Iterator

from comfy_api.latest import io

from ..backend.client import pool
from ..backend.client.dependencies import require_dependencies
from ..backend.protocol import RefusedError
from .host import handle
from .host.guidance import skips_negative
from .host.model_files import model_folders, model_paths
from .host.plan import plan
from .host.progress import node_text
from .host.socket_types import ParallelConfigType, ParallelDiTType

WEIGHT_DTYPES = ["default", "bf16", "fp16", "fp32"]
MATMULS = ["auto", "weight only", "native"]


class LoadParallelDiT(io.ComfyNode):
    """PARALLEL_CONFIG + a file or folder -> PARALLEL_DIT, a small handle; the weights are on the ranks."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LoadParallelDiT",
            display_name="Load Parallel DiT",
            category="parallel",
            description="Starts the ranks of a Parallel Config and loads a diffusion transformer on them.",
            inputs=[
                ParallelConfigType.Input(
                    "config", tooltip="From Parallel Config: on how many ranks, and how they share the work."
                ),
                io.Combo.Input(
                    "model_name",
                    options=list(model_paths()),
                    tooltip="A file in models/diffusion_models (.safetensors or .gguf) or a diffusers "
                    "folder in models/diffusers. shapes-flux is the demo model of this pack.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=WEIGHT_DTYPES,
                    default="default",
                    optional=True,
                    tooltip="Precision of the weights and of the computation. default = ComfyUI's "
                    "choice: on a GPU bf16 or fp16, as the model bears it, on the CPU fp32.",
                ),
                io.Combo.Input(
                    "matmul",
                    options=MATMULS,
                    default="auto",
                    optional=True,
                    tooltip="How quantized layers multiply. weight only = by the dequantized weight, closest "
                    "to the original model. native = their inputs are quantized too, on int8, fp8 or fp4 "
                    "tensor cores; needs comfy-kitchen. auto = native where ComfyUI multiplies so. auto "
                    "changes nothing for files that are not quantized.",
                    extra_dict={"advanced": True},
                ),
            ],
            outputs=[
                ParallelDiTType.Output(
                    display_name="dit", tooltip="For ParallelSampler, or as a MODEL through ParallelModel."
                )
            ],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, config, model_name, weight_dtype="default", matmul="auto") -> io.NodeOutput:
        guidance = list(_guidance_of_samplers(cls.hidden.prompt or {}, cls.hidden.unique_id))
        for cfg, sampler_name in guidance:
            config.check_guidance(cfg, not skips_negative(cfg, sampler_name))
        path = model_paths().get(model_name)
        if path is None or not os.path.exists(path):
            raise RefusedError(
                f"model_name is {model_name!r}, which is neither a file in models/diffusion_models nor a "
                f"diffusers folder in models/diffusers; put it there and refresh the page."
            )
        if not config.address:
            require_dependencies()
        pool.allow(*model_folders())
        dit = handle.load(config, os.path.abspath(path), weight_dtype, matmul)
        prompts = 1 if guidance and all(skips_negative(*each) for each in guidance) else 2
        node_text()("\n".join([*(rank["text"] for rank in dit.loaded.info["ranks"]), *plan(dit, prompts)]))
        return io.NodeOutput(dit)


def _guidance_of_samplers(prompt: dict, loader_id: str) -> Iterator[tuple[float, str]]:
    """cfg and sampler_name of every sampler node that this loader feeds, through ParallelLoRA too, so that a
    refusal comes before minutes of loading."""
    for key, node in prompt.items():
        inputs = node["inputs"]
        if inputs.get("dit") != [loader_id, 0]:
            continue
        if node["class_type"] == "ParallelLoRA":
            yield from _guidance_of_samplers(prompt, key)
        if node["class_type"].startswith("ParallelSampler"):
            cfg = inputs.get("cfg")
            sampler_name = inputs.get("sampler_name")
            # a linked one is not known yet
            if isinstance(cfg, (int, float)) and isinstance(sampler_name, str):
                yield cfg, sampler_name
