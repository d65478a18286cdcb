"""The ParallelConfig node: how many ranks each parallel method gets."""

import torch
from comfy_api.latest import io

from ..backend.config import ATTENTIONS, DEVICES, SPLIT_SCHEMES, STALE_KV, ParallelConfig
from .host.socket_types import ParallelConfigType

#: A degree that a mouse wheel can reach; ParallelConfig refuses what the machine does not have.
_MOST = 64


def _degree(name: str, tooltip: str) -> io.Int.Input:
    return io.Int.Input(name, default=1, min=1, max=_MOST, optional=True, tooltip=tooltip)


class ParallelConfigNode(io.ComfyNode):
    """Inputs -> a validated ParallelConfig; ConfigError for one that cannot run on this machine."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ParallelConfig",
            display_name="Parallel Config",
            category="parallel",
            description="How many GPUs each parallel method gets. The number of ranks (one per GPU) is the "
            "product of the degrees.",
            inputs=[
                _degree(
                    "cfg_degree",
                    "2 computes the positive and the negative prompt at the same time, on two halves of "
                    "the ranks. Needs a cfg other than 1.0.",
                ),
                _degree(
                    "pipefusion_degree",
                    "Stages of the PipeFusion pipeline: each holds its share of the model's blocks, so "
                    "weights per GPU shrink with it. Least traffic, so best across slow links.",
                ),
                _degree(
                    "ulysses_degree",
                    "Ranks among which attention heads and image tokens are divided. Same result, every "
                    "rank holds the whole model; best with fast links (NVLink).",
                ),
                _degree(
                    "ring_degree",
                    "Ranks among which image tokens are divided with keys and values passed around a ring. "
                    "Same result; for more ranks than the model has attention heads.",
                ),
                _degree(
                    "data_parallel_degree",
                    "Replicas of everything else; each denoises its part of the latent's batch. Same "
                    "result; the batch must be at least as large.",
                ),
                _degree(
                    "tensor_parallel_degree",
                    "Ranks among which each weight matrix is divided, so weights per GPU shrink with it. "
                    "Same result, most traffic; see split_scheme.",
                ),
                io.Int.Input(
                    "num_pipeline_patch",
                    default=0,
                    min=0,
                    max=1024,
                    optional=True,
                    tooltip="Pieces that PipeFusion cuts the image into; more keep the stages busier and "
                    "use older neighbours. 0 = as many as pipefusion_degree.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    default=1,
                    min=0,
                    max=10000,
                    optional=True,
                    tooltip="First steps that PipeFusion computes in full, before it reuses the keys and "
                    "values of the step before. More are slower and nearer to the exact result.",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(ATTENTIONS),
                    default="auto",
                    optional=True,
                    tooltip="Attention kernel: PyTorch's own (sdpa), or flash-attn / SageAttention where "
                    "they are installed.",
                ),
                io.Combo.Input(
                    "device",
                    options=list(DEVICES),
                    default="auto",
                    optional=True,
                    tooltip="Where the ranks run: one GPU each, or processes on the CPU. auto = GPUs where "
                    "there are any.",
                ),
                io.String.Input(
                    "gpus",
                    default="",
                    optional=True,
                    tooltip="Numbers of the GPUs to use, like 0,2,3,5. Empty = the first ones.",
                ),
                io.String.Input(
                    "address",
                    default="",
                    optional=True,
                    tooltip="A backend that already runs: tcp:HOST:PORT or unix:/path/to/socket, listed in "
                    "ComfyUI's environment variable PARALLEL_DIT_ADDRESSES, with its token in "
                    "PARALLEL_DIT_TOKEN. Empty = launch one on this machine.",
                ),
                io.Combo.Input(
                    "stale_kv",
                    options=list(STALE_KV),
                    default="reuse",
                    optional=True,
                    tooltip="How PipeFusion reads keys and values that this step has not computed yet: "
                    "those of the step before (reuse), or continued from the last two steps "
                    "(extrapolate; one more buffer).",
                ),
                io.String.Input(
                    "attn_layer_num_for_pp",
                    default="",
                    optional=True,
                    tooltip="Blocks of each PipeFusion stage, like 12,15,15,15. Empty = balanced.",
                ),
                io.Combo.Input(
                    "split_scheme",
                    options=list(SPLIT_SCHEMES),
                    default="megatron",
                    optional=True,
                    tooltip="How tensor_parallel_degree cuts matrices: by column then row (megatron), all "
                    "by row, all by column, or both ways (2d).",
                ),
                io.Boolean.Input(
                    "shard_weights",
                    default=False,
                    optional=True,
                    tooltip="Spread the weights over ulysses, ring and data-parallel ranks, which gather "
                    "each block as it is needed. Same result; for models that do not fit on one "
                    "GPU.",
                ),
                io.Boolean.Input(
                    "offload_modulation",
                    default=False,
                    optional=True,
                    tooltip="Keep the modulation (adaLN) weights, up to a third of the model, in host "
                    "memory: they are used for many steps at once, most often once a request. Same "
                    "result. Not for Parallel Model, where every step is a request and moves them "
                    "to the GPU.",
                ),
            ],
            outputs=[ParallelConfigType.Output(display_name="config", tooltip="For LoadParallelDiT.")],
        )

    @classmethod
    def execute(cls, **inputs) -> io.NodeOutput:
        config = ParallelConfig(**inputs).validate()
        if not config.address:
            config.resolve_device(torch.cuda.device_count())
        return io.NodeOutput(config)
