"""Every plan that could run: degrees, patches and sharded weights for so many ranks."""

from collections.abc import Iterator
from dataclasses import replace

from ..config import AXES, ParallelConfig
from .drift import drifts_too_far
from .machine import RequestEstimate
from .model_shape import ModelShape

#: Patches reuse keys and values of the step before: with fewer steps they differ too much.
MIN_STEPS = 8
#: Kernels that give no log-sum-exp, by which rings merge (parallel/attention/kernel_table.py).
NOT_OF_RINGS = ("sage-3",)
#: Fewer tokens of a rank in one patch than these keep no GPU busy.
MIN_TOKENS = 128
#: In the order of the mesh, fastest last, as products of factors are listed.
DEGREES = tuple(AXES.values())


def factorings(ranks: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write ``ranks`` as an ordered product of ``axes`` factors."""
    if axes == 1:
        yield (ranks,)
        return
    for first in range(1, ranks + 1):
        if ranks % first == 0:
            for others in factorings(ranks // first, axes - 1):
                yield first, *others


def candidates(
    shape: ModelShape, request: RequestEstimate, ranks: int, base: ParallelConfig, exact: bool = False
) -> Iterator[ParallelConfig]:
    """Yield the plans of exactly ``ranks`` ranks that fit the model, the request and the attention kernel;
    fields other than degrees, patches and sharding stay as in ``base``. ``exact``: no stale keys and
    values."""
    can_shard = not (shape.sharding_needs or base.offload_modulation)
    for sizes in factorings(ranks, len(DEGREES)):
        plan = replace(base, **dict(zip(DEGREES, sizes)), num_pipeline_patch=0, shard_weights=False)
        if not _divides(plan, shape, request):
            continue
        plans = [*_patched(plan, shape, request, exact)]
        undivided = plan.pipefusion_degree == 1 and plan.tensor_parallel_degree == 1 and not shape.whole_only
        if can_shard and plan.sharding_degree > 1 and undivided:
            plans.append(replace(plan, shard_weights=True))
        merges = base.attention not in NOT_OF_RINGS or plan.ring_degree == 1
        yield from (each for each in plans if merges or each.has_stale_kv)


def _divides(plan: ParallelConfig, shape: ModelShape, request: RequestEstimate) -> bool:
    """Return whether every rank has work: prompts, samples, blocks, heads and tokens go round."""
    tp = plan.tensor_parallel_degree
    heads = shape.heads // tp
    return (
        plan.cfg_degree <= request.prompts
        and plan.data_parallel_degree <= request.batch
        and (plan.prompt_degree == 1 or not shape.whole_only)
        and (plan.ring_degree == 1 or shape.rings)
        and (tp == 1 or (shape.tensor and (shape.head_groups or shape.heads) % tp == 0))
        and plan.ulysses_degree <= heads
        and plan.pipefusion_degree <= len(shape.blocks)
        and plan.sp_degree <= request.latent_tokens
    )


def _patched(
    plan: ParallelConfig, shape: ModelShape, request: RequestEstimate, exact: bool
) -> Iterator[ParallelConfig]:
    """Yield a plan with every number of patches that is worth it."""
    stages = plan.pipefusion_degree
    if stages == 1:
        yield plan
        return
    yield replace(plan, num_pipeline_patch=1)
    if exact:
        return
    for patches in (stages, stages + 1, 2 * stages):  # one more: no stage waits while outputs go back
        cut = replace(plan, num_pipeline_patch=patches)
        if takes_patches(cut, shape, request):
            yield cut


def takes_patches(plan: ParallelConfig, shape: ModelShape, request: RequestEstimate) -> bool:
    """Return whether a request bears stale keys and values of as many patches as ``plan`` has: its steps are
    enough, and patches long enough, where there are more of them than stages."""
    if request.drained or plan.warmup_steps < 1 or request.steps < MIN_STEPS:
        return False
    parts = plan.patches * plan.sp_degree
    if drifts_too_far(request.steps, plan.patches) or parts > request.latent_tokens:
        return False
    tokens = shape.sequence(request.image_tokens, request.text_tokens)
    return plan.patches == plan.pipefusion_degree or tokens >= MIN_TOKENS * parts
