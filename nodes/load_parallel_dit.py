"""The LoadParallelDiT node: a transformer, loaded in a backend of several ranks."""

import asyncio
from functools import partial

from comfy_api.latest import io

from ..backend.client import pool
from ..backend.client.auto import planning
from ..backend.client.auto.model_choice import ModelChoice
from ..backend.client.launching.dependencies import require_dependencies
from ..backend.client.launching.interpreter import ranks_python
from ..backend.config import ConfigError, ParallelConfig
from ..backend.planner.auto_config import AutoConfig, unused_method
from ..backend.planner.choose import MANUAL
from ..backend.protocol import RefusedError
from ..backend.protocol.load_choices import MATMULS, WEIGHT_DTYPES
from .graph.queued_config import config_in
from .graph.queued_graph import executed, queued, samplers_of, source, validated, values
from .host import handle
from .host.auto_plan import run_planned
from .host.device import check_device
from .host.graph_requests import loaded_models, request_of_graph, requests_of_graph
from .host.guidance import guidance_of, skips_negative
from .host.handle import ParallelDiT
from .host.model_files import model_choice_of, model_folders, model_paths
from .host.plan_report import loaded_lines, pixels_of, planned_line, request_lines
from .host.progress import NodeStatus, node_text
from .host.refusals import errors_on_node
from .host.report import shown
from .host.schema import ALIASES, ParallelConfigType, ParallelDiTType, advanced, schema

#: Shown while the page waits for its graph to be queued.
READING = "reading the model's headers"
#: Said where the size that the graph tells does not fit, which may not be that of the latent.
LEANEST = (
    "no plan fits the size that the graph tells, so the one that needs least was taken; Parallel Samplers "
    "plan again for their latent"
)


class LoadParallelDiT(io.ComfyNode):
    """PARALLEL_CONFIG + a file or folder -> PARALLEL_DIT, a small handle; the weights are on the ranks."""

    @classmethod
    def define_schema(cls):
        return schema(
            *ALIASES,
            node_id="LoadParallelDiT",
            reports=True,
            display_name="Load Parallel DiT",
            description="Starts the ranks of a Parallel Config and loads a diffusion transformer on them.",
            inputs=[
                ParallelConfigType.Input(
                    "config",
                    optional=True,
                    tooltip="From Parallel Config: on how many GPUs, and how they share the work. Nothing "
                    "here = all GPUs, shared in the way that is fastest for this model and sampler.",
                ),
                io.Combo.Input(
                    "model_name",
                    options=list(model_paths()),
                    tooltip="A file in models/diffusion_models (.safetensors or .gguf), an all-in-one file "
                    "in models/checkpoints, of which only the transformer is read, or a diffusers folder in "
                    "models/diffusers. shapes-flux is the demo model of this pack.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="default",
                    optional=True,
                    tooltip="Precision of the weights and of the computation. default = ComfyUI's "
                    "choice: bf16 or fp16, whichever the model bears; fp32 where the GPU does not have that "
                    "(compute capability 7.x has fp16 alone), and on the CPU.",
                ),
                advanced(
                    io.Combo.Input(
                        "matmul",
                        options=list(MATMULS),
                        default="auto",
                        optional=True,
                        tooltip="How quantized layers multiply. weight only = by the dequantized weight, "
                        "closest to the original model. native = their inputs are quantized too, on int8, "
                        "fp8 or fp4 tensor cores; needs comfy-kitchen. auto = native where ComfyUI "
                        "multiplies so. auto changes nothing for files that are not quantized.",
                    )
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
    async def validate_inputs(cls) -> bool:
        """Refuse before the graph runs what the model's headers tell. Raises RefusedError or ConfigError."""
        graph = queued()
        try:
            config = config_in(graph, source(graph, validated(), "config"))
        except ConfigError:  # which its own node says
            return True
        if not isinstance(config, ParallelConfig):
            return True
        inputs = values(graph, validated())
        choice = await asyncio.to_thread(model_choice_of, inputs)
        if choice is None:
            return True
        if not config.address:  # which may start another Python, while ComfyUI's page waits for nothing else
            await asyncio.to_thread(lambda: require_dependencies(python=ranks_python()))
        pool.allow(*model_folders())
        with errors_on_node(), NodeStatus() as status:
            check_device(config)
            await asyncio.to_thread(handle.check_model, config, choice, partial(status.show, READING))
        return True

    @classmethod
    @errors_on_node()
    def execute(cls, model_name, config=None, weight_dtype="default", matmul="auto") -> io.NodeOutput:
        key = cls.hidden.unique_id
        graph = executed(cls.hidden.prompt or {}, key)
        config = config or AutoConfig()
        guidance = guidance_of_samplers(graph, key)
        if isinstance(config, ParallelConfig):
            for cfg, sampler_name in guidance:
                config.check_guidance(cfg, not skips_negative(cfg, sampler_name))
        choice = model_choice_of({"model_name": model_name, "weight_dtype": weight_dtype, "matmul": matmul})
        if choice is None:
            raise RefusedError(
                f"model_name is {model_name!r}, which is neither a file in models/diffusion_models or "
                f"models/checkpoints nor a diffusers folder in models/diffusers; put it there and refresh "
                f"the page."
            )
        check_device(config)
        if isinstance(config, AutoConfig) or not config.address:
            require_dependencies(python=ranks_python())
        pool.allow(*model_folders())
        dit = _load(config, choice, graph, key)
        requests = requests_of_graph(graph, key, pixels_of(dit))
        plan = [planned_line(requests, dit), *dit.lines] if dit.lines else []
        lines = [*_unused(config, graph, key), *plan, *loaded_lines(dit), *request_lines(dit, requests)]
        node_text()("\n".join(lines))
        return io.NodeOutput(dit, ui=shown(lines))


def _unused(config: ParallelConfig | AutoConfig, graph: dict, key: str) -> list[str]:
    """Return a line where the Parallel Config of the loader ``key`` names a method and sets degrees too."""
    method = values(graph, source(graph, key, "config") or "").get("method", MANUAL)
    line = unused_method(method, config) if isinstance(config, ParallelConfig) else ""
    return [line] if line else []


def _load(config: ParallelConfig | AutoConfig, choice: ModelChoice, graph: dict, key: str) -> ParallelDiT:
    """Load a model on the ranks of ``config``, or on those that are the best for what the graph says."""
    if isinstance(config, ParallelConfig):
        return handle.load(config, choice)
    further = tuple(sorted(loaded_models(graph, besides=key) - {choice}))

    def planned(auto: AutoConfig, request: planning.EstimateOf) -> ParallelDiT:
        note = () if auto is config else (LEANEST,)

        def run(plan: ParallelConfig, lines: tuple[str, ...]) -> ParallelDiT:
            return handle.load(plan, choice, auto=config, others=further, lines=lines + note)

        return run_planned(planning.Asked(auto, choice, request, further), run)

    return planning.or_leanest(config, partial(request_of_graph, graph, key), planned)


def guidance_of_samplers(graph: dict, loader: str) -> list[tuple[float, str]]:
    """Return cfg and sampler_name of every sampler that this loader feeds, where they are known, so that a
    refusal comes before minutes of loading."""
    found = [guidance_of(inputs) for inputs in samplers_of(graph, loader)]
    return [guidance for guidance in found if guidance]
