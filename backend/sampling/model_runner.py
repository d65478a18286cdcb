"""A loaded model as the step loop calls it: x in, output tokens out."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn

from ..config import CHOICES, ParallelConfig
from ..hardware.device_memory import segments_grow
from ..hardware.gpu_kernels import Capability
from ..loading import parking
from ..loading.checkpoint import Checkpoint
from ..loading.load_report import LoadReport
from ..loading.lora.lora_fusion import FusedWeights, Stack
from ..models.common.fewer_passes import rotary
from ..models.common.known_signatures import known_signatures
from ..models.common.request_arguments import RequestArguments
from ..models.family import STEP_END, Family
from ..parallel import comm, fsdp
from ..parallel.attention import kernel_choice, kernel_table
from ..parallel.attention.attention_kernels import instead_of_torch, torchs_choice
from ..parallel.attention.kernel_table import activated
from ..parallel.attention.kv_buffers import KVBuffers
from ..parallel.block_streams import blocks_of
from ..parallel.compiled_blocks import Outcome, compiled, failure_lines
from ..parallel.modulation.cached_layers import first_block_argument
from ..parallel.modulation.modulation_cache import LayerCache
from ..parallel.pipeline_stage import Stage, model_output
from ..parallel.sequence import Span
from ..parallel.step_context import StepContext
from ..quantization.formats import dtype_name
from ..quantization.kernels import MatmulChoice
from ..quantization.lora_bytes import LoraBytes
from ..quantization.packed_weight import PackedWeight, quantized
from ..runtime.opaque_ops import unavailable
from ..serving.broadcast import all_gather_object
from .request import Request


@dataclass
class LoadedModel:
    """A transformer on this rank. stage: None where one rank runs every token and block. choices: quantized
    parameter -> how it multiplies. parked_on: ranks whose weights wait in host memory, the same on each.
    dequantized_bytes: of weights that stayed dequantized in the last request."""

    transformer: nn.Module
    dtype: torch.dtype
    stage: Stage | None
    report: LoadReport
    sharded: bool
    cache: LayerCache
    weights: FusedWeights
    choices: Mapping[str, MatmulChoice]
    parked_on: frozenset[int] = frozenset()
    dequantized_bytes: int = 0

    @property
    def parked(self) -> bool:
        return self.cache.mesh.rank in self.parked_on

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that hold its weights: the transformer, and modulation of blocks of other stages."""
        return [self.transformer, *chain(*self.cache.hosted)]

    @property
    def dequantized_every_step(self) -> list[PackedWeight]:
        """The quantized weights that this rank dequantizes in every step: not those of layers whose outputs
        are cached for a request."""
        cached = [layer for layer in self.cache.layers if layer.kind != "step"]
        once = {id(module) for layer in cached for module in layer.modules()}
        every = quantized([self.transformer])
        held = [each for each in every if each.device.type != "meta" and each.whole is None]
        return [each for each in held if id(each) not in once and each.choice.needs_scratch]

    @property
    def can_park(self) -> bool:
        """Return whether parking frees memory: not on the CPU, nor of weights in FSDP's buffers."""
        return self.weights.device.type == "cuda" and not self.sharded

    def park(self, ranks: Set[int]) -> bool:
        """Move the weights of ``ranks`` to host memory. Every rank calls it. Return whether any move."""
        leaving = ranks - self.parked_on
        moves = self.cache.mesh.rank in leaving
        if moves:
            parking.to_host(self.modules, pinned=torch.cuda.is_available(), ranks=len(leaving))
        self.parked_on |= ranks
        return moves

    @torch.inference_mode(False)  # what is page locked here outlives the request that brings it back
    def unpark(self, device: torch.device):
        """Move parked weights back to ``device``. Every rank calls it. Where its memory runs out, some are
        there, and all count as not parked, so that ``park`` takes those."""
        was_parked, ranks = self.parked, len(self.parked_on)
        self.parked_on = frozenset()
        if was_parked:
            parking.to_device(self.modules, device, self.cache.offloaded, ranks)
            self.cache.offload(parking.may_page_lock(self.cache.offloaded))

    @property
    def held_lora_bytes(self) -> int:
        """Count the bytes of LoRAs that are next to this rank's quantized weights now."""
        return self.weights.held_adapter_bytes()

    def lora_bytes(self, stack: Stack) -> int:
        """Count the bytes of LoRAs next to the quantized weights of this rank."""
        return self.weights.adapter_bytes(stack, self.dtype).total

    def whole_lora_bytes(self, stack: Stack) -> LoraBytes:
        """Count ``lora_bytes`` of the whole model, by how tensor parallelism cuts them."""
        return self.weights.adapter_bytes(stack, self.dtype, self.choices)

    @property
    def checkpoint(self) -> Checkpoint:
        return self.weights.checkpoint

    @property
    def family(self) -> Family:
        return self.checkpoint.family

    @property
    def head_size(self) -> int:
        """Features of an attention head; 0 where nobody knows, since nothing is cut."""
        blocks = self.family.blocks
        return 0 if blocks.whole_only else blocks.head_size(self.checkpoint.config)

    def facts(self, config: ParallelConfig, device: torch.device, capabilities: Set[Capability]) -> dict:
        """Return Loaded.info, on ranks of ``config`` with GPUs of these ``capabilities``."""
        where = (device.type, self.dtype, self.head_size, capabilities, kernel_table.merges(config))
        torchs = self._torchs_attention(device, capabilities, kernel_table.merges(config))
        return {
            "attention": {
                name: kernel_choice.explained(name, *where, torchs) for name in CHOICES["attention"]
            },
            "config": self.checkpoint.config,
            "conditioning": list(self.family.conditioning.accepted),
            "prediction": self.family.noise.prediction,
            "latent_format": self.checkpoint.latent_format,
            "generic": self.checkpoint.generic,
            "dtype": dtype_name(self.dtype),
            "device": device.type,
            "bytes_read": self.report.bytes_read,
            "quantized": self.report.quantized,
            "weights": self.checkpoint.comfy_shapes,
            "parts": self.weights.targets.parts,
        }

    def _torchs_attention(
        self, device: torch.device, capabilities: Set[Capability], ring: bool
    ) -> tuple[str, str] | None:
        """Return which kernels torch chooses for this model's heads without a mask and with one; None where
        they are of unknown size, and where GPUs differ, of which only this rank's was asked."""
        if not self.head_size or len(capabilities) != 1:
            return None
        return torchs_choice(device, self.dtype, self.head_size, ring)


@dataclass
class Runner:
    """Calls the model for one request.

    times, step_ends: evaluation -> the model's time (0-d), and for models that are told where the step ends
    (1,), both on the device.
    prompts: (prompt, lo, hi) of samples -> the prompt's arguments; shared: what they share (once_a_request).
    """

    model: LoadedModel
    request: Request
    buffers: KVBuffers | None
    outcome: Callable[[], Outcome]
    calls: int = 0
    times: dict[int, Tensor] = field(default_factory=dict)
    step_ends: dict[int, Tensor] = field(default_factory=dict)
    prompts: dict[tuple[str, int, int], RequestArguments] = field(default_factory=dict)
    shared: dict[Hashable, Any] = field(default_factory=dict)

    def plan(self, sigmas: list[Tensor]):
        """Bring the times of evaluations at ``sigmas`` (0-d, CPU) to the device, before the first step."""
        device = self.request.noise.device
        schedule_of = self.model.family.noise.schedule
        if schedule_of is None:
            times = sigmas
        else:
            schedule = schedule_of(
                self.model.checkpoint.config
            )  # one for all: it computes its noise levels once
            times = [schedule.timestep(sigma) for sigma in sigmas]
        self.times = {index: time.to(device) for index, time in enumerate(times)}
        ends = {index: self.request.step_end(sigma) for index, sigma in enumerate(sigmas)}
        self.step_ends = {index: end.to(device) for index, end in ends.items() if end is not None}

    def modulate_ahead(self, prompts: tuple[str, ...]):
        """Compute the modulation of all planned evaluations, where the family has such layers."""
        model = self.model
        if not model.family.cache.modulation:
            return
        noise = torch.zeros_like(self.request.noise)
        latent = model.family.io.of_tokens(noise, self.request.grid).to(model.dtype)

        def embedding(context):
            arguments = self._arguments(latent, context)
            name = model.family.cache.modulation_argument
            with model.cache.before_steps(context):  # positions and prompts are those of the steps
                return first_block_argument(model.transformer, model.family, arguments, name)

        every = Span(0, len(latent))
        embeddings = {
            name: [embedding(StepContext(name, index, every)) for index in self.times] for name in prompts
        }
        model.cache.modulate_ahead(embeddings, len(latent), self.request.most_samples)
        if len(latent) > 1:  # the steps of a pipeline take samples one by one
            model.cache.forget_outputs()

    def _arguments(self, latent: Tensor, context: StepContext) -> dict:
        family = self.model.family
        time = self._time(context)
        prompt = self._prompt(context)
        if context.evaluation in self.step_ends:
            prompt = prompt.at_step({STEP_END: self.step_ends[context.evaluation]})
        return family.io.arguments(self.model.checkpoint.config, self.request.grid, latent, time, prompt)

    def _prompt(self, context: StepContext) -> RequestArguments:
        key = (context.prompt, context.sample_span.lo, context.sample_span.hi)
        if key not in self.prompts:
            self.prompts[key] = RequestArguments(
                self.request.arguments(context.prompt, context.samples),
                whole=self.request.conditioning[context.prompt],
                samples=context.samples,
                shared=self.shared,
            )
        return self.prompts[key]

    def run(self, x: Tensor, sigma: Tensor, context: StepContext) -> Tensor | None:
        """Evaluate x (B, N, F) at the noise level ``sigma`` (0-d, CPU) of a planned evaluation. Return the
        output for this rank's tokens and the context's samples (b, n, F); None before the last stage."""
        self.calls += 1
        model = self.model
        grid = self.request.grid
        latent = self.request.model_input(x, sigma, context.samples, model.family.io).to(model.dtype)
        arguments = self._arguments(latent, context)
        model.cache.current.context = context
        if model.stage is None:
            return model.family.io.output(model_output(model.transformer, arguments), grid)
        reference = self.request.reference_tokens[context.prompt]
        latents = model.family.latent.named(grid)
        output = model.stage.forward(arguments, context, grid.tokens, reference, latents)
        if output is None:
            return None
        local = model.stage.local_image(context)
        return model.family.io.output(output, grid)[:, local.indices]

    def _time(self, context: StepContext) -> Tensor:
        if self.request.times is not None:
            return self.request.times[context.samples]
        return self.times[context.evaluation]

    def begin_evaluation(self, evaluation: int, ratio: float):
        """Start an evaluation; ``ratio`` is its step in sigma over the one before (0: unknown)."""
        self.model.cache.begin_evaluation(evaluation)
        if self.buffers is not None:
            self.buffers.begin_evaluation(ratio)

    def expect(self, context: StepContext) -> bool:
        """Post the receive of a forward's activations. Return False where their size is unknown, or where
        this stage's allocator may wait for that receive, and its sender's for this stage."""
        stage = self.model.stage
        return stage is None or (segments_grow() and stage.expect(context))

    def statistics(self, started: float) -> dict:
        """Return seconds since ``started``, model calls, bytes by purpose, and notes. Every rank calls it."""
        seconds = time.perf_counter() - started
        calls = {"model_calls": self.calls, "bytes_sent": dict(comm.SENT)}
        outcome = self.outcome()
        notes = [*self._unread(), outcome.made, *self._failures(outcome.failures)]
        return {"seconds": seconds, **calls, "notes": list(filter(None, notes))}

    def _failures(self, own: dict[str, list[str]]) -> list[str]:
        """Say why ranks do not compile: all run at the slowest one's speed, and rank 0 speaks for them."""
        mesh = self.model.cache.mesh
        if mesh.world_size == 1 or self.request.config.compile != "blocks":
            return failure_lines([own])
        return failure_lines(all_gather_object(own, mesh.control))

    def _unread(self) -> list[str]:
        sent = {name for arguments in self.request.conditioning.values() for name in arguments}
        return [note for name, note in self.model.family.conditioning.notes.items() if name in sent]

    def drain(self):
        """Wait until nothing travels between the stages."""
        if self.model.stage:
            self.model.stage.drain()


@contextmanager
def running(model: LoadedModel, request: Request) -> Iterator[Runner]:
    """Yield the runner of ``request``, with the attention hook in place and the layer cache in use."""
    model.cache.begin_request()
    fsdp.reshard(model.transformer)
    if model.family.io.prepare:
        model.family.io.prepare(model.transformer, request.grid)
    try:
        # torch's own function, which the hook replaces, whatever DIFFUSERS_ATTN_BACKEND says
        kernel = request.config.attention
        with attention_backend("native"), rotary(), known_signatures(), activated(kernel):
            with _attention(model, request) as buffers, _blocks(model, request) as outcome:
                yield Runner(model, request, buffers, outcome)
    finally:
        model.cache.end_request()
        fsdp.reshard(model.transformer)  # torch leaves the root's weights whole, which nobody counts


def _blocks(model: LoadedModel, request: Request) -> AbstractContextManager[Callable[[], Outcome]]:
    if request.config.compile != "blocks":
        return nullcontext(Outcome)
    return compiled(model.stage.own_blocks if model.stage else blocks_of(model.transformer, model.family))


@contextmanager
def _attention(model: LoadedModel, request: Request) -> Iterator[KVBuffers | None]:
    stage = model.stage
    if stage is None:
        with instead_of_torch(request.config.attention):
            yield None
        return
    buffers = None
    if request.config.patches > 1:
        batch = request.noise.shape[0]
        buffers = KVBuffers(batch, request.config.stale_kv == "extrapolate", request.patch_spans)
    # an overlap that compiled blocks cannot have is not given up for a torch that compiles none
    is_compiled = request.config.compile == "blocks" and unavailable() is None
    stage.begin_request(request.config.attention, buffers, request.config.wire, is_compiled)
    stage.attention.install()
    try:
        yield buffers
    finally:
        stage.attention.uninstall()
        stage.end_request()
