"""What ComfyUI takes from this pack: its nodes, and the folder with the demo model."""

import logging
from pathlib import Path

import folder_paths
from comfy_api.latest import ComfyExtension
from server import PromptServer

from ..backend.client.interrupts import DeadlineError, deadline
from ..backend.client.status import log_of_last_backend
from ..backend.protocol import BackendError
from .graph import queued_graph
from .host.models_on_ranks import free_weights
from .host.refusals import MISTAKES, says_more
from .host.remote_patcher import take_bypass_loras
from .load_diffusers_clip_vae import LoadDiffusersCLIPVAE
from .load_parallel_dit import LoadParallelDiT
from .panel import backends, graph_trials
from .panel.benchmark_prompts import trials
from .panel.routes import add_routes
from .parallel_config import ParallelConfigNode
from .parallel_demo_loader import ParallelDemoLoader
from .parallel_doctor import ParallelDoctor
from .parallel_lora import ParallelLoRA
from .parallel_model import ParallelModel
from .parallel_sampler import ParallelSampler
from .parallel_sampler_advanced import ParallelSamplerAdvanced
from .parallel_sampler_custom import ParallelSamplerCustom

DEMO_MODELS = Path(__file__).resolve().parents[1] / "demo"
#: In which ranks free what the side panel asks them to free; those that do not answer end.
FREE_SECONDS = 60.0


class ParallelDiTExtension(ComfyExtension):
    """The nodes of category "Parallel DiT"."""

    def __init__(self):
        self.is_loaded = False

    async def on_load(self):
        """Let nodes see the graph that is validated, show errors of users without tracebacks, take LoRAs of
        ComfyUI's loaders, and answer the side panel."""
        self.is_loaded = True
        PromptServer.instance.add_on_prompt_handler(queued_graph.note_queued)
        logging.getLogger().addFilter(says_more)
        take_bypass_loras()
        questions = {"status": backends.status, "log": log_of_last_backend}
        actions = {
            "free": lambda body: {"freed": free_weights(deadline(FREE_SECONDS, "ranks have freed nothing"))},
            "stop": lambda body: backends.stop(),
            "trials": lambda body: graph_trials.answer(body, PromptServer.instance, trials),
            "stop_trials": graph_trials.stop,
        }
        add_routes(PromptServer.instance.routes, questions, actions, (*MISTAKES, BackendError, DeadlineError))

    async def get_node_list(self):
        """Return the pack's nodes."""
        if not self.is_loaded:  # ComfyUI 0.8 and older call this alone
            await self.on_load()
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
