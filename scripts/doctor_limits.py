"""How far latents of scripts/doctor.py --full may be apart."""

import math

from backend.config import ParallelConfig

#: Largest relative distance of exact methods from one rank in float32. GPUs choose other kernels for other
#: shapes, which add in another order; a lost or exchanged token is off by far more.
EXACT = {"cpu": 1e-5, "cuda": 1e-3}
#: Largest distance of one rank from ComfyUI's latent, in standard deviations: 1e-4 on the CPU; attention of
#: random weights is sharp, and other kernels add in another order.
COMFYUI = 2e-3
#: What is above this is to be reported: nobody has measured several GPUs yet.
USUAL = 1e-5
#: As EXACT, of stale keys and values, which random weights drift by (scripts/check_family.py).
STALE = 0.25
#: The same of float8 on the wire, of which four steps of the doctor's families have 0.03 (docs/drift.md).
WIRE = 0.1
#: bf16 of a method may be so many times as far from float32 as bf16 of one rank.
BF16_RATIO = 3.0
#: Largest relative distance of exact methods from one rank at real sizes, in the files' own type: float32 on
#: the CPU, bf16 on GPUs.
REAL_SIZE = {"cpu": 1e-5, "cuda": 5e-2}
#: The same of quantized files, whose products round what they multiply.
QUANTIZED = 5e-2


def approximation(config: ParallelConfig) -> tuple[float, str]:
    """Return how far a method may be from one rank in float32 by what it leaves out, and that in words; 0 and
    "" of exact methods."""
    if config.has_stale_kv:
        return STALE, "stale keys and values"
    if config.wire == "fp8":
        return WIRE, f"float8 on the wire, limit {WIRE:g}"
    return 0.0, ""


def compared(
    distance: float, config: ParallelConfig, device: str, is_quantized: bool = False
) -> tuple[bool, str]:
    """Return whether a latent of real size is near enough to one rank's, and the distance in words."""
    if config.has_stale_kv:
        return math.isfinite(distance), f"latent {distance:.1e} from one rank (stale keys and values)"
    limit = max(REAL_SIZE[device], QUANTIZED if is_quantized else 0.0, approximation(config)[0])
    # NaN is not within it
    return distance <= limit, f"latent {distance:.1e} from one rank (limit {limit:g})"
