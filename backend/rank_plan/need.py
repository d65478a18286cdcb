"""What a request and a load still have to allocate on each rank: at least, and likely.

A request is refused by the first alone, so estimates count with their lower side there. ComfyUI is asked to
make room for the second.
"""

from dataclasses import dataclass

from ..planner.memory import LIKELY_ACTIVATIONS
from .describe import RankPlan

#: Released models hold between 0.77 and 1.22 of the estimate of activations in dry runs, tiny ones between
#: 1/1.45 and 1/0.75, and from 1/1.65 on with control videos in float32 (tests/unit/test_rank_memory.py). GPUs
#: were not measured: the least is half, the likely most is the larger end of the tiny ones
#: (LIKELY_ACTIVATIONS).
MIN_ACTIVATIONS = 0.5
#: Of the keys and values that are planned for the longest of the prompts. Tiny models of all families hold
#: them to the byte, but for text that three pad or repeat (up to 1.3 times); a shorter prompt holds less.
#: Those of prompts count so, too, and a request that does not fit is refused earlier by them: Wan 14B needs
#: 0.38 GB for them at least, LTX-2 1.1 GB. Wan Animate's layers for faces are counted with the tokens of a
#: prompt and an image: at 77 frames all of its layers hold about 0.86 of what is planned.
MIN_KV = 0.9


@dataclass(frozen=True)
class Need:
    """Bytes that a rank has yet to allocate."""

    least: int
    likely: int


def request_need(plan: RankPlan, scratch_held: int = 0) -> Need:
    """Count what a request allocates on a rank whose weights are loaded and whose groups are connected;
    ``scratch_held``: bytes to dequantize in that are there from an earlier request."""
    least = int(MIN_KV * plan.kv_bytes)
    least += int(MIN_ACTIVATIONS * (plan.activation_bytes + plan.gathered_bytes))
    likely = plan.kv_bytes + plan.modulation_bytes + plan.gathered_bytes
    likely += int(LIKELY_ACTIVATIONS * plan.activation_bytes)
    likely += max(0, plan.scratch_bytes - scratch_held)
    return Need(least, likely)


def weight_need(plan: RankPlan, is_host: bool) -> int:
    """Count the bytes of weights on the device of a rank. ``is_host``: its memory is the host's."""
    return plan.weight_bytes + (plan.host_bytes if is_host else 0)


def load_need(plan: RankPlan, device: str, mapped: bool, is_host: bool = False) -> Need:
    """Count what a load allocates on a rank. ``mapped``: on the CPU, weights stay in the file's pages,
    which the system takes back as it likes. ``is_host``: as in weight_need."""
    weights = weight_need(plan, is_host)
    return Need(0 if device == "cpu" and mapped else weights, weights + plan.scratch_bytes)
