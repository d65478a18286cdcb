"""What each rank of a plan computes, by its share of the work."""

import itertools
from dataclasses import dataclass
from functools import lru_cache

from ..config import ParallelConfig
from ..shares import relative_shares, shard_sizes


@dataclass(frozen=True)
class RankShare:
    """One rank's share of the work. stage: of the pipeline. tokens, heads, matrices: multiples of an even
    share among the ranks of sequence, Ulysses and tensor parallelism. samples: how many of the batch."""

    stage: int
    tokens: float
    heads: float
    matrices: float
    samples: int


@lru_cache(maxsize=4096)
def rank_shares(plan: ParallelConfig, batch: int) -> tuple[RankShare, ...]:
    """Return the share of every rank of a plan with ``batch`` samples."""
    replicas = plan.data_parallel_degree
    samples = [max(1, size) for size in shard_sizes(batch, count=replicas, shares=plan.shares_of("dp"))]
    tokens = relative_shares(plan.sp_degree, plan.shares_of("ring", "ulysses"))
    heads = relative_shares(plan.ulysses_degree, plan.shares_of("ulysses"))
    matrices = relative_shares(plan.tensor_parallel_degree, plan.shares_of("tp"))
    places = itertools.product(*(range(size) for size in plan.degrees.values()))
    return tuple(
        RankShare(
            stage=pp,
            tokens=tokens[ring * plan.ulysses_degree + ulysses],
            heads=heads[ulysses],
            matrices=matrices[tp],
            samples=samples[dp],
        )
        for dp, _, pp, ring, ulysses, tp in places
    )
