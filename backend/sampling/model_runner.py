"""A loaded model as the step loop calls it: x in, output tokens out."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..loading.load_report import LoadReport
from ..loading.lora_fusion import FusedWeights
from ..models.family import Family
from ..parallel import comm
from ..parallel.cached_layers import first_block_argument
from ..parallel.kv_buffers import KVBuffers
from ..parallel.modulation_cache import LayerCache
from ..parallel.pipeline_stage import Stage, model_output
from ..parallel.step_context import StepContext
from ..quantization.kernels import Choice
from .request import Request


@dataclass
class LoadedModel:
    """A transformer on this rank. ``stage`` is None where one rank runs every token and block. ``choices``:
    quantized parameter -> how it multiplies."""

    transformer: nn.Module
    dtype: torch.dtype
    stage: Stage | None
    report: LoadReport
    sharded: bool
    cache: LayerCache
    weights: FusedWeights
    choices: Mapping[str, Choice]

    @property
    def family(self) -> Family:
        return self.weights.checkpoint.family

    @property
    def config(self) -> dict:
        """Arguments of the diffusers class."""
        return self.weights.checkpoint.config

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank read of the checkpoint."""
        return self.report.bytes_read


class Runner:
    """Calls the model for one request."""

    def __init__(self, model: LoadedModel, request: Request, buffers: KVBuffers | None = None):
        self.model = model
        self.request = request
        self.buffers = buffers
        self.calls = 0

    def statistics(self, started: float) -> dict:
        """Return the seconds since ``started``, the calls of the model and the bytes by purpose of the
        request."""
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "model_calls": self.calls, "bytes_sent": dict(comm.SENT)}

    def modulate_ahead(self, sigmas: list[Tensor], branches: tuple[str, ...]):
        """Compute the modulation of evaluations at all ``sigmas`` (0-d), where the family has such layers."""
        model = self.model
        # sharded weights are whole only inside their block's forward
        if not model.family.cache.modulation or model.sharded:
            return
        latent = self.request.grid.to_latent(torch.zeros_like(self.request.noise)).to(model.dtype)

        def embedding(branch, sigma):
            arguments = model.family.io.arguments(
                model.config,
                self.request.grid,
                latent,
                self._time(sigma.to(latent.device), slice(None)),
                self.request.arguments(branch, slice(None), sigma.to(latent.device)),
            )
            name = model.family.cache.modulation_argument
            return first_block_argument(model.transformer, model.family, arguments, name)

        model.cache.modulate_ahead(
            {branch: [embedding(branch, sigma) for sigma in sigmas] for branch in branches}
        )

    def run(self, x: Tensor, sigma: Tensor, context: StepContext) -> Tensor | None:
        """Evaluate x (B, N, F) at the noise level ``sigma``; return the output of this rank's tokens and the
        samples of ``context`` (b, n, F), or None on all but the last stage."""
        self.calls += 1
        model = self.model
        grid = self.request.grid
        sigma = sigma.to(x.device)
        latent = self.request.model_input(x, sigma, context.samples).to(model.dtype)
        arguments = model.family.io.arguments(
            model.config,
            grid,
            latent,
            self._time(sigma, context.samples),
            self.request.arguments(context.branch, context.samples, sigma),
        )
        model.cache.index.context = context
        if model.stage is None:
            return model.family.io.output(model_output(model.transformer, model.family, arguments), grid)
        reference = self.request.reference_tokens[context.branch]
        output = model.stage.forward(arguments, context, grid.tokens, reference)
        if output is None:
            return None
        local = model.stage.local_image(context)
        return model.family.io.output(output, grid)[:, local.lo : local.hi]

    def _time(self, sigma: Tensor, samples: slice) -> Tensor:
        """The model's own time of a noise level, or the samples' times where the client sent them."""
        schedule = self.model.family.noise.schedule
        if self.request.times is not None:
            return self.request.times[samples]
        return schedule(self.model.config).timestep(sigma) if schedule else sigma

    def begin_evaluation(self, evaluation: int, ratio: float):
        """Start an evaluation; ``ratio`` is its step in sigma over the one before (0: unknown)."""
        self.model.cache.begin_evaluation(evaluation)
        if self.buffers is not None:
            self.buffers.begin_evaluation(ratio)

    def expect(self, context: StepContext) -> bool:
        """Make ready to receive a forward's activations; return False where their size is not known yet."""
        return self.model.stage is None or self.model.stage.expect(context)

    def drain(self):
        """Wait for every activation under way."""
        if self.model.stage:
            self.model.stage.drain()


@contextmanager
def running(model: LoadedModel, request: Request) -> Iterator[Runner]:
    """Yield the runner of ``request``, with the attention hook in place and the layer cache in use."""
    model.cache.begin_request()
    if model.family.io.prepare:
        model.family.io.prepare(model.transformer, request.grid)
    try:
        with _attention(model, request) as buffers:
            yield Runner(model, request, buffers)
    finally:
        model.cache.end_request()


@contextmanager
def _attention(model: LoadedModel, request: Request) -> Iterator[KVBuffers | None]:
    stage = model.stage
    if stage is None:
        yield None
        return
    buffers = None
    if request.config.patches > 1:
        batch = request.noise.shape[0]
        buffers = KVBuffers(batch, request.config.stale_kv == "extrapolate", request.patch_spans)
    stage.begin_request(request.config.attention, buffers)
    stage.attention.install()
    try:
        yield buffers
    finally:
        stage.attention.uninstall()
        stage.attention.begin_request(
            request.config.attention, None
        )  # keys and values do not outlive the request
