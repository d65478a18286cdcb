"""What ComfyUI takes from this pack: its nodes, and the folder with the demo model."""

import logging
from pathlib import Path

import folder_paths
from comfy_api.latest import ComfyExtension
from server import PromptServer

from .host import queued
from .host.refusals import NoTracebackOfMistakes
from .load_diffusers_clip_vae import LoadDiffusersCLIPVAE
from .load_parallel_dit import LoadParallelDiT
from .parallel_config import ParallelConfigNode
from .parallel_demo_loader import ParallelDemoLoader
from .parallel_doctor import ParallelDoctor
from .parallel_lora import ParallelLoRA
from .parallel_model import ParallelModel
from .parallel_sampler import ParallelSampler
from .parallel_sampler_advanced import ParallelSamplerAdvanced
from .parallel_sampler_custom import ParallelSamplerCustom

DEMO_MODELS = Path(__file__).resolve().parents[1] / "demo"


class ParallelDiTExtension(ComfyExtension):
    """The nodes of category "Parallel DiT"."""

    async def on_load(self):
        """Let nodes see the graph that is validated, and errors of users without tracebacks."""
        PromptServer.instance.add_on_prompt_handler(queued.remember)
        logging.getLogger().addFilter(NoTracebackOfMistakes())

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
            ParallelDoctor,
        ]
