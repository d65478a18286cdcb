"""When classifier-free guidance computes the negative prompt."""

import math

from ...backend.config import ConfigError, ParallelConfig
from ...backend.protocol.solver_names import NEEDS_NEGATIVE


def skips_negative(cfg: float, sampler_name: str) -> bool:
    """Return whether the negative prompt is never computed, as in ComfyUI."""
    return math.isclose(cfg, 1.0) and sampler_name not in NEEDS_NEGATIVE


def check_guidance(cfg: float, sampler_name: str, config: ParallelConfig):
    """Raise ConfigError where ``cfg`` leaves half of the ranks without work."""
    if config.cfg_degree == 2 and skips_negative(cfg, sampler_name):
        raise ConfigError(
            "cfg is 1.0, which skips the negative prompt, so cfg_degree 2 would leave half of the ranks "
            "without work; set cfg_degree to 1 (and ulysses_degree to 2, say) or raise cfg."
        )
