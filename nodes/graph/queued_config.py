"""The Parallel Config of a queued graph, before it runs."""

import torch

from ...backend.config import ParallelConfig
from ...backend.planner.auto_config import AutoConfig, config_of
from .queued_graph import values


def config_in(graph: dict, node: str | None) -> ParallelConfig | AutoConfig | None:
    """Return the configuration of a Parallel Config in a queued graph; None where there is none, or where it
    is not known yet. ConfigError as ``config_of``."""
    known = graph.get(node or "", {})
    inputs = values(graph, node or "")
    if known.get("class_type") != "ParallelConfig" or len(inputs) < len(known["inputs"]):
        return None
    return config_of(torch.cuda.device_count(), **inputs)
