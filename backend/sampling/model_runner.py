"""A loaded model as the step loop calls it: x in, output rows out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..loading.load_report import LoadReport
from ..loading.lora_fusion import FusedWeights
from ..models.family import Family
from ..parallel.kv_buffers import KVBuffers
from ..parallel.modulation_cache import Memos, first_block_argument
from ..parallel.pipeline_stage import Forward, Stage, model_output
from .request import Request


@dataclass
class LoadedModel:
    """A transformer on this rank. ``stage`` is None where one rank runs every row and block: then the model
    is untouched.

    generic: what clients must know where no family file describes the model (Checkpoint.generic).
    """

    transformer: nn.Module
    family: Family
    config: dict
    dtype: torch.dtype
    stage: Stage | None
    report: LoadReport
    sharded: bool
    latent_format: str | None
    memos: Memos
    weights: FusedWeights
    generic: dict | None = None

    @property
    def bytes_read(self) -> int:
        return self.report.bytes_read


class Runner:
    """Calls the model for one request."""

    def __init__(self, model: LoadedModel, request: Request, buffers: KVBuffers | None = None):
        self.model, self.request, self.buffers, self.calls = model, request, buffers, 0
        self.evaluation = -1

    def modulate_ahead(self, sigmas: list[Tensor], branches: tuple[str, ...]):
        """Compute the modulation of model calls before they begin, where the family has such layers:
        ``sigmas`` are all calls' noise levels."""
        model = self.model
        if (
            not model.family.cache.modulation or model.sharded
        ):  # sharded weights are whole only inside their block's forward
            return
        latent = self.request.grid.to_latent(torch.zeros_like(self.request.noise)).to(model.dtype)

        def arguments(branch, sigma):
            return model.family.io.arguments(
                model.config,
                self.request.grid,
                latent,
                self._time(sigma.to(latent.device), slice(None)),
                self.request.arguments(branch, slice(None)),
            )

        def embedding(branch, sigma):
            return first_block_argument(
                model.transformer,
                model.family,
                arguments(branch, sigma),
                model.family.cache.modulation_argument,
            )

        model.memos.modulate_ahead(
            {branch: [embedding(branch, sigma) for sigma in sigmas] for branch in branches}
        )

    def run(self, x: Tensor, sigma: Tensor, forward: Forward) -> Tensor | None:
        """x (B, N, F) at noise level ``sigma`` -> output of this rank's rows and items of ``forward`` (b,
        rows, F); None on all but the last stage."""
        self.calls += 1
        model, grid = self.model, self.request.grid
        sigma = sigma.to(x.device)
        items = slice(forward.items.lo, forward.items.hi)
        latent = self.request.model_input(x, sigma, items).to(model.dtype)
        arguments = model.family.io.arguments(
            model.config,
            grid,
            latent,
            self._time(sigma, items),
            self.request.arguments(forward.branch, items),
        )
        moment = model.memos.moment
        moment.branch, moment.evaluation, moment.items = forward.branch, self.evaluation, forward.items
        if model.stage is None:
            return model.family.io.output(model_output(model.transformer, model.family, arguments), grid)
        forward.tokens, forward.context = grid.tokens, self.request.context[forward.branch]
        output = model.stage.forward(arguments, forward)
        if output is None:
            return None
        rows = forward.rows.local.image
        return model.family.io.output(output, grid)[:, rows.lo : rows.hi]

    def _time(self, sigma: Tensor, items: slice) -> Tensor:
        """What the family's forward_args gets at a noise level: the model's own time of it, or the items'
        times where the client told them."""
        schedule = self.model.family.noise.schedule
        if self.request.times is not None:
            return self.request.times[items]
        return schedule(self.model.config).timestep(sigma) if schedule else sigma

    def begin_evaluation(self, ratio: float):
        """A model call at the next noise level starts; ``ratio`` is its step in sigma over the one before (0:
        unknown)."""
        self.evaluation += 1
        self.model.memos.begin_call(self.evaluation)
        if self.buffers is not None:
            self.buffers.begin_evaluation(ratio)

    def expect(self, forward: Forward) -> bool:
        """Make ready to receive the activations of a forward that follows; False where their size is not
        known yet."""
        return self.model.stage is None or self.model.stage.expect(forward)

    def drain(self):
        """Wait for every activation under way."""
        if self.model.stage:
            self.model.stage.drain()


@contextmanager
def running(model: LoadedModel, request: Request) -> Iterator[Runner]:
    """The runner of ``request``, with the attention hook in place and the memos awake meanwhile."""
    model.memos.begin_request()
    if model.family.io.prepare:
        model.family.io.prepare(model.transformer, request.grid)
    try:
        with _attention(model, request) as buffers:
            yield Runner(model, request, buffers)
    finally:
        model.memos.end_request()


@contextmanager
def _attention(model: LoadedModel, request: Request) -> Iterator[KVBuffers | None]:
    if model.stage is None:
        yield None
        return
    buffers = (
        KVBuffers(request.noise.shape[0], request.stale_kv == "extrapolate", request.patch_spans)
        if request.patches > 1
        else None
    )
    model.stage.begin_request(request.kernel, buffers)
    model.stage.attention.install()
    try:
        yield buffers
    finally:
        model.stage.attention.uninstall()
        model.stage.attention.begin_request(
            request.kernel, None
        )  # keys and values do not outlive the request
