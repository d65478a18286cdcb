"""The ParallelConfig node: how many ranks each parallel method gets."""

import torch
from comfy_api.latest import io

from ..backend.config import AXES, CHOICES, ParallelConfig
from ..backend.planner.auto_config import config_of
from ..backend.planner.choose import AUTO, METHODS
from .graph.queued_config import config_in
from .graph.queued_graph import queued, validated
from .host.refusals import errors_on_node
from .host.schema import ALIASES, ParallelConfigType, advanced, schema

#: The largest values that a mouse wheel can reach; ParallelConfig refuses what the machine does not have.
_MAX_VALUES = {**dict.fromkeys(AXES.values(), 64), "num_pipeline_patch": 1024, "warmup_steps": 10000}
#: Field of ParallelConfig -> its tooltip, in the order of the node's widgets, which saved graphs rely on.
TOOLTIPS = {
    "cfg_degree": "2 computes the positive and the negative prompt at the same time, on two halves of the "
    "ranks. Needs a cfg other than 1.0.",
    "pipefusion_degree": "Stages of the PipeFusion pipeline: each holds its share of the model's blocks, so "
    "weights per GPU shrink with it. Little traffic, so best across slow links, for images: its stale keys "
    "and values of a video take more memory than it saves.",
    "ulysses_degree": "Ranks among which attention heads and image tokens are divided. Same result, every "
    "rank holds the whole model; best with fast links (NVLink).",
    "ring_degree": "Ranks among which image tokens are divided with keys and values passed around a ring "
    "while attention computes. Same result; for slow links, long videos, and more ranks than the model has "
    "attention heads.",
    "data_parallel_degree": "Replicas of everything else; each denoises its part of the latent's batch. Same "
    "result; the batch must be at least as large.",
    "tensor_parallel_degree": "Ranks among which each weight matrix is divided, so weights per GPU shrink "
    "with it. Same result, most traffic; see split_scheme.",
    "num_pipeline_patch": "Pieces that PipeFusion cuts the image into; more keep the stages busier and use "
    "older neighbours. 0 = as many as pipefusion_degree, or one more where auto has measured these GPUs and "
    "that fills the pipeline better.",
    "warmup_steps": "First steps that PipeFusion computes in full, before it reuses the keys and values of "
    "the step before. More are slower and nearer to the exact result.",
    "attention": "Attention kernel: PyTorch's own (auto, sdpa), or FlashAttention 2 to 4, cuDNN's, or "
    "SageAttention 2 and 3 (approximate), where the GPUs have it and it is installed. Load Parallel DiT says "
    "which one runs and why.",
    "device": "Where the ranks run: one GPU each, or processes on the CPU. auto = GPUs where there are any.",
    "gpus": "How many GPUs to use, like 2, or their numbers, like 0,2,3. Empty = all of them. On the CPU: "
    "how many processes, empty = one. Under manual with every degree 1 it is the number of the one GPU.",
    "address": "A backend that already runs: tcp:HOST:PORT or unix:/path/to/socket, listed in ComfyUI's "
    "environment variable PARALLEL_DIT_ADDRESSES, with its token in PARALLEL_DIT_TOKEN. Empty = launch one "
    "on this machine.",
    "stale_kv": "How PipeFusion reads keys and values that this step has not computed yet: those of the step "
    "before (reuse), or continued from the last two steps (extrapolate; one more buffer).",
    "attn_layer_num_for_pp": "Blocks of each PipeFusion stage, like 12,15,15,15. Empty = balanced.",
    "split_scheme": "How tensor_parallel_degree cuts matrices: by column then row (megatron), all by row, "
    "all by column, or both ways (2d).",
    "shard_weights": "Spread the weights over ulysses, ring and data-parallel ranks, which gather each block "
    "as it is needed. Same result; for models that do not fit on one GPU. Over PCIe it can slow images down. "
    "Quantized files need torch 2.12, FLUX.3 and MiniMax-H3 2.8.",
    "offload_modulation": "Keep the modulation (adaLN) weights, up to a third of the model, in host memory: "
    "they are used for many steps at once, most often once a request. Same result. Not for Parallel Model, "
    "where every step is a request and moves them to the GPU.",
    "method": "How the GPUs share the work. auto: the fastest way for this model, size, steps, cfg, memory "
    "and links, none that it estimates to be slower than one GPU where it fits there; every sampler may "
    "get its own. fastest exact: without PipeFusion, which drifts a little. least memory: the least per GPU. "
    "manual: the degrees of the advanced inputs. Setting a degree makes it manual; back to auto: delete the "
    "node and add a new one.",
    "compile": "Compile the model's blocks with torch.compile: faster steps, after a first run that "
    "compiles for up to minutes and fills a cache. Needs torch 2.13 or later, and Triton and a C compiler on "
    "GPUs. auto: where method is not manual, these are there, and the run is long enough to pay for it.",
    "shares": "Each GPU's share of the work, in the order of gpus, for GPUs that differ: 60,40. It divides "
    "tokens, heads, blocks and samples. Same result. Empty = measured by auto where GPUs differ, else equal.",
    "wire": "How Ulysses and ring ranks send queries, keys, values and outputs: full, or fp8 (float8 with a "
    "scale for each token and head). Half the traffic of bf16, for slow links; not exact, so auto never "
    "takes it. Needs ulysses_degree or ring_degree above 1.",
}
#: What most people need to see; the rest is folded away where ComfyUI knows advanced inputs.
BASIC = ("gpus", "method", "device")


def _widget(name: str, tooltip: str):
    """Return the widget of a field, of the type of its default."""
    shared = {"default": getattr(ParallelConfig, name, AUTO), "optional": True, "tooltip": tooltip}
    if name == "method":
        return io.Combo.Input(name, options=list(METHODS), **shared)
    if name in CHOICES:
        return io.Combo.Input(name, options=list(CHOICES[name]), **shared)
    if name in _MAX_VALUES:
        return io.Int.Input(name, min=int(name in AXES.values()), max=_MAX_VALUES[name], **shared)
    kind = io.Boolean if isinstance(shared["default"], bool) else io.String
    return kind.Input(name, **shared)


class ParallelConfigNode(io.ComfyNode):
    """Inputs -> a validated ParallelConfig, or an AutoConfig where the degrees are left open; ConfigError for
    what cannot run on this machine."""

    @classmethod
    def define_schema(cls):
        widgets = {name: _widget(name, tooltip) for name, tooltip in TOOLTIPS.items()}
        return schema(
            *ALIASES,
            node_id="ParallelConfig",
            display_name="Parallel Config",
            description="How many GPUs, and how they share the work: auto chooses for each sampler, unless a "
            "degree is set. Then the number of ranks (one per GPU) is the product of the degrees.",
            inputs=[each if name in BASIC else advanced(each) for name, each in widgets.items()],
            outputs=[ParallelConfigType.Output(display_name="config", tooltip="For LoadParallelDiT.")],
        )

    @classmethod
    def validate_inputs(cls) -> bool:
        """Raise ConfigError before the graph runs; inputs that are linked are seen when it does."""
        with errors_on_node():  # the page's own toast cuts them off
            config_in(queued(), validated())
        return True

    @classmethod
    @errors_on_node()
    def execute(cls, **inputs) -> io.NodeOutput:
        return io.NodeOutput(config_of(torch.cuda.device_count(), **inputs))
