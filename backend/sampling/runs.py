"""Runs of a loaded model over the mesh: a whole request, or one call. Every rank makes the same."""

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..loading.staging import Download, lock_ahead
from ..parallel import comm
from ..parallel.mesh import Mesh
from ..parallel.sequence import Span
from ..protocol import Sample
from ..quantization.dequantize_once import dequantized_once
from ..quantization.dequantized_cache import pays
from .model_call import OneCall, samples_of_replicas
from .model_runner import LoadedModel, running
from .request import Request
from .step_loop import Callbacks, Denoiser

#: Previews on the host at once: one that is sent, and the next on its way.
PREVIEWS = 2


@dataclass(frozen=True)
class Prepared:
    """A loaded model with its LoRAs in place, and a request's tensors on this rank. No collective has run.
    ``spare``: bytes of the device that nothing needs until the request ends."""

    model: LoadedModel
    request: Request
    spare: int = 0


def run_request(mesh: Mesh, prepared: Prepared, sample: Sample, callbacks: Callbacks) -> tuple[Tensor, dict]:
    """Denoise what is ``prepared`` of a ``sample``; as Engine.sample."""
    comm.SENT.clear()
    model = prepared.model
    model.dequantized_bytes = 0  # not those of the last request, where memory runs out before
    request = prepared.request
    started = time.perf_counter()
    if mesh.rank == 0 and mesh.device.type == "cuda" and sample.preview_seconds:
        lock_ahead(request.grid.to_latent(request.noise), PREVIEWS)
    with running(model, request) as runner:
        denoiser = Denoiser(mesh, request, runner, with_downloads(callbacks, request))
        calls = denoiser.planned_calls
        # a single call of the model dequantizes each weight once anyway
        spare = prepared.spare if calls > 1 else 0
        repeated = model.dequantized_every_step if spare else []
        if mesh.device.type == "cuda":  # whose memory goes back after the request
            repeated = [w for w in repeated if pays(calls, moved=w.effort.moved, cached=w.dtype.itemsize)]
        with dequantized_once(repeated, spare) as model.dequantized_bytes:
            tokens = denoiser.run()
        tokens = _all_replicas(mesh, tokens, request)
        if sample.denoised:
            last = _all_replicas(mesh, denoiser.x0, request)
            callbacks.on_denoised(request.grid.to_latent(last).cpu())
    samples = request.prediction.finish(request.grid.to_latent(tokens), request.sigmas[-1])
    return samples.cpu(), {**runner.statistics(started), "dequantized_once": model.dequantized_bytes}


def with_downloads(callbacks: Callbacks, request: Request) -> Callbacks:
    """Return ``callbacks`` whose on_step gets a function that starts a Download of x0 as a latent."""

    def on_step(step, x0):
        return callbacks.on_step(step, lambda: Download(request.grid.to_latent(x0)))

    return replace(callbacks, on_step=on_step)


def call_model(mesh: Mesh, prepared: Prepared, batch: int) -> tuple[Tensor, dict]:
    """Call the model once; as Engine.forward. ``batch``: samples of all replicas."""
    comm.SENT.clear()
    request = prepared.request
    started = time.perf_counter()
    with running(prepared.model, request) as runner:
        tokens = OneCall(mesh, request, runner).run()
    output = request.grid.to_latent(tokens)
    counts = [len(each) for each in samples_of_replicas(batch, mesh)]
    of_dp = [counts[i : i + mesh.cfg.size] for i in range(0, len(counts), mesh.cfg.size)]
    output = comm.gather(output, of_dp[mesh.dp.rank], mesh.cfg, "outputs")
    if mesh.cfg.is_first:
        output = comm.gather(output, list(map(sum, of_dp)), mesh.dp, "outputs")
    return output[:batch].cpu(), runner.statistics(started)


def _all_replicas(mesh: Mesh, tokens: Tensor, request: Request) -> Tensor:
    """Return the whole batch (B, N, F) on rank 0 from the first stages of the data-parallel replicas."""
    dp = mesh.dp
    counts = [len(Span(0, request.batch).shard(i, dp.size, dp.shares)) for i in range(dp.size)]
    shapes = [(count, *tokens.shape[1:]) for count in counts]
    return torch.cat(comm.all_gather(tokens, shapes, mesh.dp, "outputs"))
