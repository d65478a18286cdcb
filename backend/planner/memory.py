"""Bytes that the ranks of a plan hold: weights, keys and values, activations."""

import math
from dataclasses import dataclass, fields

from ..config import ParallelConfig
from ..quantization.lora_bytes import LoraBytes
from .machine import RequestEstimate, samples_at_once
from .model_shape import ModelShape, modulation_of, samples_of_activations, stages_of
from .rank_shares import RankShare, rank_shares

#: Activations that a rank likely has at most, as a multiple of their estimate; admission (rank_plan/need.py)
#: asks ComfyUI for so much room.
LIKELY_ACTIVATIONS = 4 / 3
#: Share of spare memory in which weights may stay dequantized.
SPARE = 0.75
#: Bytes left to other programs in any case, such as ComfyUI's previews.
LEFT_FREE = 500_000_000
#: Share of the likely need that is left as a reserve, for a request that needs more.
DOUBT = 0.25


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of a rank, or the most of any rank. activations: the estimated part of the transient ones."""

    weights: int
    keys: int
    transient: int
    activations: int

    @property
    def bytes(self) -> int:
        return self.weights + self.keys + self.transient

    @property
    def likely(self) -> int:
        """All of them with as many activations as there likely are at most."""
        return self.bytes + math.ceil((LIKELY_ACTIVATIONS - 1) * self.activations)


def spare_bytes(left: int, likely: int) -> int:
    """Return the bytes for dequantized weights, of those ``left`` besides what a request ``likely`` needs."""
    return max(0, min(int(SPARE * left) - LEFT_FREE, left - int(DOUBT * likely)))


def held(shape: ModelShape, plan: ParallelConfig, request: RequestEstimate, others: tuple = ()) -> HeldBytes:
    """Count what the fullest rank holds, the most of each kind, with the weights of ``others``."""
    ranks = held_by_rank(shape, plan, request, others)
    return HeldBytes(*(max(getattr(each, kind.name) for each in ranks) for kind in fields(HeldBytes)))


def held_by_rank(
    shape: ModelShape, plan: ParallelConfig, request: RequestEstimate, others: tuple = ()
) -> list[HeldBytes]:
    """Count what each rank holds; ``others`` as in held."""
    ranks = rank_shares(plan, request.batch)
    known = {share: _held(shape, plan, request, others, share) for share in set(ranks)}
    return [known[share] for share in ranks]


def _held(
    shape: ModelShape, plan: ParallelConfig, request: RequestEstimate, others: tuple, share: RankShare
) -> HeldBytes:
    weights = sum(_weights(each, plan, share) for each in (shape, *others))
    loras = request.loras.and_of(request.other_loras) if others else request.loras
    weights += _loras(shape, plan, loras, share)
    activations = _activations(shape, plan, request, share)
    scratch = shape.scratch + (shape.scratch_of_cuts if plan.tensor_parallel_degree > 1 else 0)
    transient = activations + _gathered(shape, plan, request) + scratch
    return HeldBytes(
        weights=weights, keys=_keys(shape, plan, request, share), transient=transient, activations=activations
    )


def _weights(shape: ModelShape, plan: ParallelConfig, share: RankShare) -> int:
    """Return the bytes of weights on a rank; modulation is spread to balance them. FSDP2 cuts equally."""
    if plan.shard_weights:
        return math.ceil(shape.weights / plan.sharding_degree)
    own = _own_blocks(shape, plan, share)
    cut = share.matrices / plan.tensor_parallel_degree
    plain = sum(
        block.weights * (1 - block.cut + block.cut * cut) for block in shape.blocks[own.start : own.stop]
    )
    if not plan.offload_modulation:
        stages, stage = _stage(shape, plan, share)
        plain += modulation_of(shape, stages, plan.shares_of("pp"))[stage] * cut
    return math.ceil(shape.rest + plain)


def _stage(shape: ModelShape, plan: ParallelConfig, share: RankShare) -> tuple[int, int]:
    """Return how many stages the blocks of ``shape`` make, and which of them a rank has."""
    stages = min(plan.pipefusion_degree, max(1, len(shape.blocks)))
    return stages, min(share.stage, stages - 1)


def _own_blocks(shape: ModelShape, plan: ParallelConfig, share: RankShare) -> range:
    stages, stage = _stage(shape, plan, share)
    return stages_of(shape, stages, plan.shares_of("pp"))[stage]


def _loras(shape: ModelShape, plan: ParallelConfig, loras: LoraBytes, share: RankShare) -> int:
    """Count the bytes of ``loras`` next to quantized weights on a rank, of its stage's blocks. FSDP2 does not
    cut them."""
    if not loras.total:
        return 0
    own = _own_blocks(shape, plan, share)
    weights = [block.weights for block in shape.blocks]
    own_loras = loras.on_rank(share.matrices / plan.tensor_parallel_degree)
    return math.ceil(own_loras * sum(weights[own.start : own.stop]) / max(1, sum(weights)))


def _keys(shape: ModelShape, plan: ParallelConfig, request: RequestEstimate, share: RankShare) -> int:
    """Count the bytes of PipeFusion's stale keys and values, or of those of static text, and of prompts'."""
    own = _own_blocks(shape, plan, share)
    of_prompts = _of_prompts(shape, plan, request, share)
    if not plan.has_stale_kv:
        return of_prompts + _static_text(shape, plan, request, share)
    buffers = 2 if plan.stale_kv == "extrapolate" else 1
    prompts = request.prompts_per_rank(plan.cfg_degree)
    ranks = plan.tensor_parallel_degree * plan.ulysses_degree
    heads = math.ceil(shape.heads / ranks * share.matrices * share.heads)
    width = shape.heads * shape.head_size
    keys = sum(block.sent(width)[1] for block in shape.blocks[own.start : own.stop])
    keys *= shape.kv_repeats(plan)
    token = 2 * heads * keys // shape.heads * shape.itemsize
    tokens = shape.sequence(request.image_tokens, request.text_tokens)
    return of_prompts + buffers * prompts * share.samples * token * tokens


def _of_prompts(shape: ModelShape, plan: ParallelConfig, request: RequestEstimate, share: RankShare) -> int:
    """Count the bytes of keys and values that cross-attention caches of all prompts and samples; a call
    forgets those of samples before others run."""
    own = _own_blocks(shape, plan, share)
    features = sum(block.prompt_keys for block in shape.blocks[own.start : own.stop])
    if plan.split_scheme == "megatron":
        features *= share.matrices / plan.tensor_parallel_degree
    cached = share.samples * request.prompts_per_rank(plan.cfg_degree)
    if request.drained:
        cached = samples_of_activations(plan, _samples_together(plan, request, share))
    tokens = max(request.text_tokens, shape.padded_prompt) + shape.image_features
    return math.ceil(2 * cached * features * tokens * shape.itemsize)


def _static_text(shape: ModelShape, plan: ParallelConfig, request: RequestEstimate, share: RankShare) -> int:
    """Return the bytes of a prompt's keys and values in families that compute them once a request."""
    if not shape.static_text:
        return 0
    heads = shape.heads / (plan.tensor_parallel_degree * plan.ulysses_degree) * share.matrices * share.heads
    own = _own_blocks(shape, plan, share)
    token = 2 * math.ceil(heads) * shape.head_size * shape.itemsize * len(own)
    tokens = math.ceil(request.text_tokens / plan.ring_degree)
    return request.prompts_per_rank(plan.cfg_degree) * share.samples * token * tokens


def _gathered(shape: ModelShape, plan: ParallelConfig, request: RequestEstimate) -> int:
    """Count the bytes of sharded weights that are whole for a moment: at least rank_plan's gathered_bytes,
    which knows the layers of a block's modulation one by one."""
    if not plan.shard_weights:
        return 0
    sizes = sorted((block.weights for block in shape.blocks), reverse=True)
    largest, second = sizes[0], sizes[min(1, len(sizes) - 1)]
    modulation = max(block.modulation for block in shape.blocks)
    if request.drained:  # while its block runs
        return shape.rest + 2 * largest + max(second, shape.rest) + 2 * modulation
    first = modulation or shape.blocks[0].weights
    return shape.rest + max(2 * largest + max(second, modulation), 2 * first + max(shape.rest, modulation))


def _activations(shape: ModelShape, plan: ParallelConfig, request: RequestEstimate, share: RankShare) -> int:
    own = _own_blocks(shape, plan, share)
    streams = max((shape.blocks[index - 1].skips for index in own if index), default=0)
    streams += own.start > 0  # a stage holds what it received
    carried = streams * shape.width * shape.itemsize
    largest = max((shape.blocks[index].activations for index in own), default=1.0)
    tokens = request.image_tokens + request.text_tokens
    activations = shape.activations.with_text(request.text_tokens / tokens)
    token = activations.on_rank(plan, carried, share.tokens, share.matrices, largest)
    held = activations.of_samples(plan, _samples_together(plan, request, share), token)
    return math.ceil(tokens * held)


def _samples_together(plan: ParallelConfig, request: RequestEstimate, share: RankShare) -> int:
    """Count the samples of a rank that go through the model together; a call has those of all prompts."""
    if not request.drained or plan.pipefusion_degree > 1:
        return share.samples
    every = share.samples * request.prompts_per_rank(plan.cfg_degree)
    return min(every, samples_at_once(request.image_tokens))
