"""Modulation that a request computes ahead: what is cached at once, how often its sharded weights come."""

import math

from ..models.family import Family
from ..parallel.modulation.modulation_chunks import counted_embeddings, embeddings_ahead, evaluations_ahead
from ..planner.rank_shares import rank_shares
from .workload import MeshPlace, Workload


def shared_embeddings(family: Family) -> int:
    """Count the embeddings of an evaluation that all samples and prompts share, one for each nested latent;
    0 where each has its own. Not counted are two more of MiniMax-H3's reference tokens, and those of
    HunyuanVideo's given first frame, a second one of each prompt and sample."""
    if family.cache.modulation_per_sample:
        return 0
    return len(family.latent.nested.names) if family.latent.nested else 1


def modulation_bytes(work: Workload, place: MeshPlace) -> int:
    """Count the bytes of modulation cached at once, of one prompt that all samples share; of one evaluation
    of all samples at least where replicas shard their weights."""
    widths = work.modulation_widths[place["tp"]]
    ahead = embeddings_ahead(max(widths), work.dtype.itemsize)
    shared = shared_embeddings(work.family)
    different = shared or work.prompts_per_rank
    most = min(work.request.calls * different, max(different, ahead))
    if work.config.shard_weights and work.config.data_parallel_degree > 1 and not shared:
        most = max(most, work.batch * work.prompts_per_rank)
    return most * widths[place["pp"]] * work.dtype.itemsize


def gathers_ahead(work: Workload) -> int:
    """Count how often sharded weights of modulation are gathered in a request that computes it ahead: once
    for as many evaluations as fit. At most as often, but for what shared_embeddings does not count
    (counted_embeddings)."""
    embeddings = counted_embeddings(
        work.prompts_per_rank,
        samples=max(share.samples for share in rank_shares(work.config, work.request.batch)),
        shared=shared_embeddings(work.family),
        replicas=work.config.data_parallel_degree,
    )
    (width,) = work.modulation_widths[0]  # sharded weights have one stage, and no matrix is cut
    at_once = evaluations_ahead(width, work.dtype.itemsize, embeddings)
    return math.ceil(work.request.calls / at_once)
