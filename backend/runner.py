"""A loaded model as the step loop calls it: x in, output rows out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .models.spec import Family
from .parallel.stage import Forward, Stage
from .request import Request


@dataclass
class LoadedModel:
    """A transformer on this rank. ``stage`` is None where one rank runs every row and block: then the model is untouched."""

    transformer: nn.Module
    family: Family
    config: dict
    dtype: torch.dtype
    stage: Stage | None
    bytes_read: int
    latent_format: str | None


class Runner:
    """Calls the model for one request."""

    def __init__(self, model: LoadedModel, request: Request):
        self.model, self.request, self.calls = model, request, 0

    def run(self, x: Tensor, sigma: Tensor, forward: Forward) -> Tensor | None:
        """x (B, N, F) at noise level ``sigma`` -> output of this rank's rows of ``forward`` (B, rows, F); None on all but the last stage."""
        self.calls += 1
        model, grid = self.model, self.request.grid
        sigma = sigma.to(x.device)
        latent = grid.to_latent(self.request.prediction.model_input(x, sigma)).to(model.dtype)
        arguments = model.family.forward_args(model.config, grid, latent, sigma, self.request.conditioning[forward.branch])
        if model.stage is None:
            return model.family.output(model.transformer(**arguments, return_dict=False)[0], grid)
        output = model.stage.forward(arguments, forward)
        if output is None:
            return None
        rows = forward.rows.local[1]
        return model.family.output(output, grid)[:, rows.lo: rows.hi]

    def expect(self, forward: Forward):
        """Make ready to receive the activations of a forward that follows."""
        if self.model.stage:
            self.model.stage.expect(forward)

    def drain(self):
        """Wait for every activation under way."""
        if self.model.stage:
            self.model.stage.drain()


@contextmanager
def running(model: LoadedModel, request: Request) -> Iterator[Runner]:
    """The runner of ``request``, with the attention hook in place meanwhile."""
    if model.stage is None:
        yield Runner(model, request)
        return
    model.stage.begin_request(request.kernel, buffered=model.stage.pipe is not None and request.patches > 1)
    model.stage.attention.install()
    try:
        yield Runner(model, request)
    finally:
        model.stage.attention.uninstall()
        model.stage.attention.begin_request(request.kernel, False)       # keys and values do not outlive the request
