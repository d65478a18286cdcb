"""The LoadParallelDiT node: a transformer, loaded in a backend of several ranks."""

import math
import os

import folder_paths
from comfy_api.latest import io

from ..backend.client import pool
from ..backend.client.dependencies import require_dependencies
from ..backend.config import ConfigError, ParallelConfig
from ..backend.protocol import RefusedError
from ..backend.protocol.solver_names import NEEDS_NEGATIVE
from .diffusers_folder.pipelines import INDEXES
from .host import handle
from .host.plan import plan
from .host.progress import node_text
from .parallel_config import ParallelConfigType

ParallelDiTType = io.Custom("PARALLEL_DIT")
WEIGHT_DTYPES = ["default", "bf16", "fp16", "fp32"]
#: Where GGUF files are: ComfyUI's own list leaves them out, and ComfyUI-GGUF has one of its own.
GGUF_FOLDERS = {"diffusion_models", "unet_gguf"}


def model_paths() -> dict[str, str]:
    """Name -> path of what can be loaded: files of diffusion_models, GGUF included, and folders of diffusers
    that hold a transformer."""
    paths = {
        name: folder_paths.get_full_path("diffusion_models", name)
        for name in folder_paths.get_filename_list("diffusion_models")
    }
    for kind in GGUF_FOLDERS & folder_paths.folder_names_and_paths.keys():
        for root in folder_paths.get_folder_paths(kind):
            names, _ = folder_paths.recursive_search(root, excluded_dir_names=[".git"])
            for name in folder_paths.filter_files_extensions(names, [".gguf"]):
                paths.setdefault(name, os.path.join(root, name))
    return paths | {name: folder for name, folder in diffusers_folders().items() if name not in paths}


def model_folders() -> list[str]:
    """Below these a backend may load files: where ComfyUI keeps what the nodes of this pack name."""
    kinds = folder_paths.folder_names_and_paths.keys() & {*GGUF_FOLDERS, "diffusers", "loras"}
    return [root for kind in kinds for root in folder_paths.get_folder_paths(kind)]


def diffusers_folders() -> dict[str, str]:
    """Name -> path of the folders of diffusers: pipelines, and transformers alone."""
    paths = {}
    for root in folder_paths.get_folder_paths("diffusers"):
        for folder, below, files in os.walk(root, followlinks=True):
            if not {*INDEXES, "config.json"}.isdisjoint(files):
                below.clear()  # the parts of a pipeline are no models of their own
                paths.setdefault(os.path.relpath(folder, root), folder)
    return paths


def skips_negative(cfg: float, sampler_name: str) -> bool:
    """Whether the negative prompt is never computed, as in ComfyUI."""
    return math.isclose(cfg, 1.0) and sampler_name not in NEEDS_NEGATIVE


def check_guidance(cfg: float, sampler_name: str, config: ParallelConfig):
    """ConfigError where ``cfg`` leaves half of the ranks without work."""
    if config.cfg_degree == 2 and skips_negative(cfg, sampler_name):
        raise ConfigError(
            "cfg is 1.0, which skips the negative prompt, so cfg_degree 2 would leave half of the ranks "
            "without work; set cfg_degree to 1 (and ulysses_degree to 2, say) or raise cfg."
        )


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
                    tooltip="Precision of the weights and of the computation. default = that of the file "
                    "on a GPU, fp32 on the CPU.",
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
    def execute(cls, config, model_name, weight_dtype="default") -> io.NodeOutput:
        guidance = list(_guidance_of_samplers(cls.hidden.prompt or {}, cls.hidden.unique_id))
        for cfg, sampler_name in guidance:
            check_guidance(cfg, sampler_name, config)
        path = model_paths().get(model_name)
        if path is None or not os.path.exists(path):
            raise RefusedError(
                f"model_name is {model_name!r}, which is neither a file in models/diffusion_models nor a "
                f"diffusers folder in models/diffusers; put it there and refresh the page."
            )
        if not config.address:
            require_dependencies()
        pool.allow(*model_folders())
        dit = handle.load(config, os.path.abspath(path), weight_dtype)
        prompts = 1 if guidance and all(skips_negative(*each) for each in guidance) else 2
        node_text()("\n".join([*(rank["text"] for rank in dit.loaded.info["ranks"]), *plan(dit, prompts)]))
        return io.NodeOutput(dit)


def _guidance_of_samplers(prompt: dict, loader_id: str):
    """cfg and sampler_name of every sampler node that this loader feeds, through ParallelLoRA too, so that a
    refusal comes before minutes of loading."""
    for key, node in prompt.items():
        inputs = node["inputs"]
        if inputs.get("dit") != [loader_id, 0]:
            continue
        if node["class_type"] == "ParallelLoRA":
            yield from _guidance_of_samplers(prompt, key)
        if node["class_type"].startswith("ParallelSampler"):
            cfg, sampler_name = inputs.get("cfg"), inputs.get("sampler_name")
            if isinstance(cfg, (int, float)) and isinstance(
                sampler_name, str
            ):  # a linked one is not known yet
                yield cfg, sampler_name
