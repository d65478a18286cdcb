"""What describe() says of the runs of ranks/matrix.py."""

from collections import Counter

import torch
from ranks.flux_cases import MODULATION_AHEAD

from backend.config import ParallelConfig
from backend.loading.checkpoint import Checkpoint
from backend.rank_plan import RequestSize, describe


def described(
    config: ParallelConfig, checkpoint: Checkpoint, steps: int, batch: int, dtype: torch.dtype | None = None
) -> list[dict[str, int]]:
    """What describe() says that every rank sends in ``steps`` of 60 image and 12 text tokens, and keeps of
    modulation. Weights are sent by torch, which counts none; the dry runs do (test_scaling_page.py)."""
    plans = describe(config, checkpoint, RequestSize(60, 12, batch, calls=steps), dtype)
    # these send each other their results and last predictions, of (16, 20, 12) a sample, once a request
    replicas = config.data_parallel_degree
    once = {"outputs": 2 * (replicas - 1) * batch // replicas * 16 * 20 * 12 * 4} if replicas > 1 else {}
    return [
        dict(
            Counter({name: steps * size for name, size in plan.bytes_per_step.items() if name != "weights"})
            + Counter(once)
        )
        | {MODULATION_AHEAD: plan.modulation_bytes}
        for plan in plans
    ]
