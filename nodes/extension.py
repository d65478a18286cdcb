"""What ComfyUI takes from this pack: its nodes, and the folder with the demo model."""

from pathlib import Path

import folder_paths
from comfy_api.latest import ComfyExtension

from .demo import ParallelDemoLoader
from .load import LoadParallelDiT
from .load_parts import LoadDiffusersCLIPVAE
from .lora import ParallelLoRA
from .parallel_config import ParallelConfigNode
from .parallel_model import ParallelModel
from .sampler import ParallelSampler, ParallelSamplerAdvanced, ParallelSamplerCustom

DEMO_MODELS = Path(__file__).resolve().parents[1] / "demo"


class ParallelDiTExtension(ComfyExtension):
    """The nodes of category "parallel"."""

    async def get_node_list(self):
        folder_paths.add_model_folder_path("diffusers", str(DEMO_MODELS))
        return [
            ParallelConfigNode,
            LoadParallelDiT,
            ParallelLoRA,
            ParallelSampler,
            ParallelSamplerAdvanced,
            ParallelSamplerCustom,
            ParallelModel,
            LoadDiffusersCLIPVAE,
            ParallelDemoLoader,
        ]
