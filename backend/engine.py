"""Load -> parallelize -> sample, on one rank. Every rank calls the same methods in the same order."""

import time

import torch
from torch import Tensor

from .checks import check_sample
from .config import ParallelConfig
from .denoise import Callbacks, Denoiser
from .errors import UnsupportedError
from .loading.checkpoint import Checkpoint, open_checkpoint
from .mesh import Mesh
from .parallel import comm
from .parallel.split import stage_blocks
from .parallel.stage import Stage
from .protocol import Sample
from .request import build
from .runner import LoadedModel, running

WEIGHT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Engine:
    """The models of this rank, and how they run on ``mesh``."""

    def __init__(self, config: ParallelConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.models: dict[str, LoadedModel] = {}

    # ------------------------------------------------------------------ loading
    def check_load(self, path: str, weight_dtype: str) -> Checkpoint:
        """Open a checkpoint and refuse what cannot run, reading headers only. Raises UnsupportedError."""
        if weight_dtype not in ("default", *WEIGHT_DTYPES):
            raise UnsupportedError(f"weight_dtype is {weight_dtype!r}; choose default, {', '.join(WEIGHT_DTYPES)}.")
        checkpoint = open_checkpoint(path)
        blocks, heads = checkpoint.block_count, checkpoint.config[checkpoint.family.heads]
        if self.config.pipefusion_degree > blocks:
            raise UnsupportedError(f"pipefusion_degree is {self.config.pipefusion_degree} but {checkpoint.name} has {blocks} blocks; every stage needs one, so set pipefusion_degree to {blocks} or less.")
        if self.config.ulysses_degree > heads:
            raise UnsupportedError(f"ulysses_degree is {self.config.ulysses_degree} but {checkpoint.name} has {heads} attention heads; every Ulysses rank needs one, so set ulysses_degree to {heads} or less and use ring_degree for the rest.")
        return checkpoint

    def load(self, key: str, path: str, weight_dtype: str):
        """Load the transformer at ``path`` under the name ``key``: this rank's blocks and the shared layers."""
        checkpoint = self.check_load(path, weight_dtype)
        dtype = self.weight_dtype(checkpoint, weight_dtype)
        blocks = stage_blocks(checkpoint.block_count, self.mesh.pp.size)[self.mesh.pp.rank]
        transformer, bytes_read = checkpoint.load(blocks, dtype, self.mesh.device)
        cut = self.mesh.pp.size > 1 or self.mesh.sp.size > 1
        stage = Stage(transformer, checkpoint.family, self.mesh, blocks) if cut else None
        self.models[key] = LoadedModel(transformer, checkpoint.family, checkpoint.config, dtype, stage, bytes_read, checkpoint.latent_format)

    def weight_dtype(self, checkpoint: Checkpoint, weight_dtype: str) -> torch.dtype:
        """The named dtype; default is the file's on CUDA and float32 on the CPU, where half precision is slow."""
        if weight_dtype != "default":
            return WEIGHT_DTYPES[weight_dtype]
        return checkpoint.dtype if self.mesh.device.type == "cuda" else torch.float32

    def unload(self, key: str):
        """Free a model; no error where it is not loaded."""
        self.models.pop(key, None)
        if self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()

    def facts(self, key: str) -> dict:
        """What a client needs to know of a loaded model (Loaded.info)."""
        model = self.models[key]
        return {
            "config": model.config,
            "conditioning": list(model.family.conditioning),
            "latent_format": model.latent_format,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": self.mesh.device.type,
            "bytes_read": model.bytes_read,
        }

    # ------------------------------------------------------------------ sampling
    def check_sample(self, sample: Sample):
        """Refuse a request that cannot run, before any collective. Raises UnsupportedError or ConfigError."""
        if sample.model not in self.models:
            raise UnsupportedError(f"the model {sample.model!r} is not loaded in this backend; run LoadParallelDiT again.")
        model = self.models[sample.model]
        check_sample(sample, self.config, model.family, model.config, model.dtype, self.mesh.device.type)

    @torch.inference_mode()
    def sample(self, sample: Sample, callbacks: Callbacks) -> tuple[Tensor, dict]:
        """Denoise; (B, C, [T,] H, W) in float32 on the head, and statistics. Raises denoise.Cancelled.

        callbacks.on_step gets the number of steps done and a function that makes x0 as a latent.
        """
        comm.SENT.clear()
        model = self.models[sample.model]
        request = build(sample, self.config, model.family, model.config, model.dtype, self.mesh.device)
        started = time.perf_counter()
        on_step = lambda step, x0: callbacks.on_step(step, lambda: request.grid.to_latent(x0).cpu())
        with running(model, request) as runner:
            tokens = Denoiser(self.mesh, request, runner, Callbacks(on_step, callbacks.should_stop)).run()
        samples = request.prediction.finish(request.grid.to_latent(tokens), request.sigmas[-1])
        return samples.cpu(), {"seconds": time.perf_counter() - started, "model_calls": runner.calls, "bytes_sent": dict(comm.SENT)}
