"""Bytes that the fullest rank of a plan holds: weights, keys and values, activations."""

import math
from dataclasses import dataclass

from ..config import ParallelConfig
from .machine import Request
from .model_shape import BlockShape, ModelShape, modulation_of, stages_of

#: Blocks whose weights are whole at once under FSDP2: the one that runs and one ahead.
GATHERED = 2
#: As rank_plan/activations.py counts: tensors of the width of the stream outside of the blocks, and those
#: that ranks exchange around attention.
OUTSIDE = 4
EXCHANGED = 4


@dataclass(frozen=True)
class Held:
    """Bytes of the fullest rank, by what they are for."""

    weights: int
    keys: int
    transient: int

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.weights + self.keys + self.transient


def held(shape: ModelShape, plan: ParallelConfig, request: Request, others: tuple = ()) -> Held:
    """Count what the fullest rank holds. ``others``: shapes whose weights stay on the same ranks."""
    stages = [shape.blocks[each.start : each.stop] for each in stages_of(shape, plan.pipefusion_degree)]
    weights = _weights(shape, plan) + sum(_weights(other, plan) for other in others)
    keys = max(_keys(shape, plan, request, blocks) for blocks in stages)
    return Held(weights, keys, _transient(shape, plan, request))


def _weights(shape: ModelShape, plan: ParallelConfig) -> int:
    """Bytes of the heaviest stage; modulation is spread to balance them."""
    if plan.shard_weights:
        return math.ceil(shape.weights / (plan.sp_degree * plan.data_parallel_degree))
    stages = min(plan.pipefusion_degree, max(1, len(shape.blocks)))
    split = stages_of(shape, stages)
    plain = [sum(_cut(block, plan) for block in shape.blocks[each.start : each.stop]) for each in split]
    if not plan.offload_modulation:
        placed = modulation_of(shape, stages)
        plain = [size + placed[stage] / plan.tensor_parallel_degree for stage, size in enumerate(plain)]
    return math.ceil(shape.rest + max(plain))


def _cut(block: BlockShape, plan: ParallelConfig) -> float:
    """Bytes of a block's weights on one rank of a tensor-parallel group."""
    return block.weights * (1 - block.cut + block.cut / plan.tensor_parallel_degree)


def _samples(plan: ParallelConfig, request: Request) -> int:
    return math.ceil(request.batch / plan.data_parallel_degree)


def _keys(shape: ModelShape, plan: ParallelConfig, request: Request, blocks: tuple[BlockShape, ...]) -> int:
    """Bytes of PipeFusion's buffers of stale keys and values."""
    if plan.pipefusion_degree == 1 or plan.patches == 1:
        return 0
    buffers = 2 if plan.stale_kv == "extrapolate" else 1
    branches = math.ceil(request.prompts / plan.cfg_degree)
    heads = math.ceil(shape.heads / plan.tensor_parallel_degree / plan.ulysses_degree)
    token = 2 * heads * shape.head_size * shape.itemsize
    tokens = shape.sequence(request.image_tokens, request.text_tokens)
    return buffers * branches * _samples(plan, request) * len(blocks) * token * tokens


def _transient(shape: ModelShape, plan: ParallelConfig, request: Request) -> int:
    """Bytes of activations, and of weights that are whole for a moment."""
    image, text = request.image_tokens, request.text_tokens
    inside = shape.activation_image * image + shape.activation_text * text
    if plan.sp_degree > 1:
        heads = shape.heads * shape.head_size * shape.itemsize
        inside = (inside + EXCHANGED * heads * shape.sequence(image, text)) / plan.sp_degree
    outside = OUTSIDE * shape.width * shape.itemsize * (image + text)
    found = _samples(plan, request) * max(inside, outside) + shape.scratch
    if plan.shard_weights:
        sizes = sorted((block.weights + block.modulation for block in shape.blocks), reverse=True)
        found += shape.rest + sum(sizes[:GATHERED])
    return math.ceil(found)
