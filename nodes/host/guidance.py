"""When classifier-free guidance computes the negative prompt."""

import math

from ...backend.protocol.solver_names import NEEDS_NEGATIVE


def skips_negative(cfg: float, sampler_name: str) -> bool:
    """Return whether the negative prompt is never computed, as in ComfyUI."""
    return math.isclose(cfg, 1.0) and sampler_name not in NEEDS_NEGATIVE
