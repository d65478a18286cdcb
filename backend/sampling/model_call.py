"""One call of the model over the mesh, for clients that own the step loop (ComfyUI's samplers on the MODEL of
ParallelModel): a request of one evaluation whose prediction is the model's output, run by the same step loop.

The batch is spread over the replicas of both the dp and the cfg axis: its samples know of no CFG branches.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..config import ParallelConfig
from ..errors import UnsupportedError
from ..loading.checkpoint import Checkpoint
from ..parallel.mesh import ALONE, Mesh
from ..parallel.sequence import Span
from ..parallel.step_context import StepContext
from ..planner.machine import samples_at_once
from ..protocol import ModelCall
from ..shares import shard_edges
from .guidance import Prompt
from .model_inputs import ModelInputs, inputs_of, run_config
from .model_runner import Runner
from .prediction import OUTPUT
from .request import Request
from .solver_registry import Evaluation
from .step_loop import Callbacks, Denoiser, Patch, Pending
from .tensor_validation import check_arguments, check_latent
from .validation import RequestTarget, check_kernel, check_patches, check_wire


def check_call(call: ModelCall, config: ParallelConfig, target: RequestTarget) -> ModelInputs:
    """Return what a call gives the model. Raises UnsupportedError or ConfigError where it cannot run."""
    family = target.checkpoint.family
    run = run_config(call, config).validate()
    check_wire(run, family)
    check_kernel(run, target)
    for name in ("x", "time"):
        if name not in call.tensors:
            raise UnsupportedError(f"the call has no tensor {name!r}; send it.")
    x = call.tensors["x"]
    time = call.tensors["time"]
    if not x.numel() or not x.is_floating_point():
        raise UnsupportedError(
            f"the model was called with x of {x.dtype} and shape {tuple(x.shape)}; send a latent that "
            f"is not empty, in float32, float16 or bfloat16."
        )
    check_latent(tuple(x.shape), call.latent_shapes, target.checkpoint, has_more=True)
    if time.shape != x.shape[:1]:
        raise UnsupportedError(
            f"the model was called with timesteps of shape {tuple(time.shape)}, where {family.name} takes "
            f"one for each of the {x.shape[0]} samples; send as many."
        )
    if family.latent.nested and (time != time[:1]).any():
        raise UnsupportedError(
            f"the model was called with the timesteps {time.tolist()}, where the latents of {family.name} "
            f"have one in common; call it for each sample by itself."
        )
    inputs = inputs_of(call, target.checkpoint)
    [arguments] = inputs.prompts.values()
    check_arguments("the conditioning", arguments, inputs, target.checkpoint)
    check_patches(run, inputs.grid)
    return inputs


def samples_of_replicas(batch: int, mesh: Mesh) -> list[list[int]]:
    """Return the samples of the batch that each replica on dp x cfg computes: by their shares, or equally
    many, where the last sample of a batch that does not divide, or is smaller, is computed again. Equally
    many too under sharded weights: replicas gather these together, once a micro-batch."""
    replicas = mesh.dp.size * mesh.cfg.size
    if mesh.replica_shares and mesh.weights is None and batch >= replicas:
        ends = shard_edges(batch, count=replicas, shares=mesh.replica_shares)
        return [list(range(start, end)) for start, end in pairwise(ends)]
    count = -(-batch // replicas)
    samples = [min(sample, batch - 1) for sample in range(replicas * count)]
    return [samples[first : first + count] for first in range(0, len(samples), count)]


def build_call(
    call: ModelCall,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    samples: list[int],
    inputs: ModelInputs | None = None,
) -> Request:
    """Build the request of a checked call for some ``samples`` of its batch; ``inputs``: by the check."""
    family = checkpoint.family
    inputs = inputs or inputs_of(call, checkpoint)
    grid = inputs.grid
    batch = inputs.batch
    [(name, arguments)] = inputs.prompts.items()
    given = _of_samples(inputs.latent, samples, batch).to(device, torch.float32).contiguous()
    times = _of_samples(call.tensors["time"], samples, batch).to(device, torch.float32)
    conditioning = {
        key: family.conditioning.cast(key, _of_samples(value, samples, batch), device, dtype)
        for key, value in arguments.items()
    }
    # the model's input follows from x where latents are rescaled; else it is ``given``, and x has no values
    rescale = family.latent.nested and family.latent.nested.rescale
    tokens = grid.to_tokens(given) if rescale else given.new_empty(len(samples), grid.tokens, grid.features)
    return Request(
        # the loop reads of a configuration what the call sets, and that there is one patch
        config=run_config(call, ParallelConfig()),
        prediction=OUTPUT,
        sigmas=call.tensors["time"][:1].float(),
        noise=tokens,
        latent=tokens,
        grid=grid,
        prompts={name: Prompt(name)},
        conditioning={name: conditioning},
        reference_tokens={name: family.conditioning.context_tokens(checkpoint.config, grid, arguments)},
        batch=len(samples),
        own_samples=slice(None),
        rescale=rescale,
        times=None if family.latent.nested else times,
        given=None if rescale else family.io.of_latent(given, grid),
    )


def _of_samples(value: Tensor, samples: list[int], batch: int) -> Tensor:
    """Return some samples of ``value``; what is for all samples is repeated. Adjacent ones are not copied: a
    prompt is several times the latent."""
    if not value.ndim:
        return value
    if value.shape[0] != batch:
        return value.expand(len(samples), *value.shape[1:])
    first = samples[0]
    end = samples[-1] + 1
    return value[first:end] if samples == list(range(first, end)) else value[samples]


class OneCall(Denoiser):
    """The step loop where the client has its solver: one evaluation, whose output is the answer."""

    def __init__(self, mesh: Mesh, request: Request, runner: Runner):
        super().__init__(replace(mesh, cfg=ALONE), request, runner, Callbacks())

    def _plan(self) -> list[Evaluation]:
        return [Evaluation(self.request.sigmas[0], 0)]

    def _modulate_ahead(self):
        """Run only weights in host memory or on another stage ahead: there is no next call."""
        cache = self.runner.model.cache
        if cache.hosted or cache.offload_device.type != self.x.device.type:
            super()._modulate_ahead()

    def _begin(self):
        self.x = self.request.noise

    def _start_solvers(self):
        pass

    def _micro_batches(self, patch: Patch, index: int, prompts: tuple[str, ...]) -> list[StepContext]:
        batch = self.x.shape[0]
        tokens = self.request.grid.tokens + max(self.request.reference_tokens.values(), default=0)
        is_pipeline = self.mesh.pp.size > 1
        size = 1 if is_pipeline else samples_at_once(tokens)
        return [
            StepContext(name, index, Span(first, min(first + size, batch)))
            for name in prompts
            for first in range(0, batch, size)
        ]

    def _hand_over(self, patch: Patch, context: StepContext, output: Tensor | None):
        """Bring outputs to the first stage; forget the samples' prompts, which no others of the call read."""
        super()._hand_over(patch, context, output)
        self.runner.model.cache.forget_outputs()

    def _collect(self, pending: Pending):
        [output] = self._take(pending).values()
        self.x = self.request.denoised(self.x, pending.evaluation.sigma, output, pending.patch.span)

    def _broadcast_stop(self, evaluation: Evaluation):
        """Never stop: rank 0 asked before it broadcast the call, and a call that has begun is short."""
