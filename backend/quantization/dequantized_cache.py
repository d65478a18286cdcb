"""Whether weights may stay dequantized in memory that is spare (quantization/dequantize_once.py)."""

import os

#: 0 in the environment of client and ranks: they may not.
CACHE_VARIABLE = "PARALLEL_DIT_CACHE_DEQUANTIZED"

#: Of this process, whose ranks have run out of memory. Not in its environment, with which ComfyUI starts
#: itself again.
_have_run_out = False


def have_ranks_run_out() -> bool:
    """Return whether ranks that this process started have run out of memory in the midst of a request."""
    return _have_run_out


def may_cache_dequantized() -> bool:
    """Return whether weights may take what nothing likely needs."""
    return os.environ.get(CACHE_VARIABLE) != "0" and not have_ranks_run_out()


def stop_caching_dequantized():
    """Have ranks that this process starts from now on leave it free: others ran out of memory."""
    global _have_run_out
    _have_run_out = True


def rank_variables() -> dict[str, str]:
    """Return the environment that stops ranks from caching dequantized weights, or none."""
    return {} if may_cache_dequantized() else {CACHE_VARIABLE: "0"}
