"""When classifier-free guidance computes the negative prompt."""

import math

from ...backend.protocol.solver_names import NEEDS_NEGATIVE


def skips_negative(cfg: float, sampler_name: str) -> bool:
    """Return whether the negative prompt is never computed, as in ComfyUI."""
    return math.isclose(cfg, 1.0) and sampler_name not in NEEDS_NEGATIVE


def guidance_of(inputs: dict) -> tuple[float, str] | None:
    """Return cfg and sampler_name of a sampler's inputs; None where they are linked, so not known yet."""
    cfg = inputs.get("cfg")
    sampler_name = inputs.get("sampler_name")
    if isinstance(cfg, (int, float)) and isinstance(sampler_name, str):
        return float(cfg), sampler_name
    return None
