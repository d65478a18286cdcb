"""Whether weights may stay dequantized in memory that is spare (quantization/dequantize_once.py)."""

import os

#: 0 in the environment of client and ranks: they may not.
CACHE_VARIABLE = "PARALLEL_DIT_CACHE_DEQUANTIZED"

#: Bytes that dequantizing moves while a byte of memory is given back after a request and mapped anew in the
#: next one. Growing segments do so in pieces of 20 MiB, computed as 0.2 ms each for both; a GPU of 1 TB/s
#: moves 200 MB meanwhile. Not measured. For 2 bytes of bf16 plain fp8 moves 3, and pays from 8 calls on; fp8
#: with a scale moves 7, and pays from 4; Q4_K 6.2, from 5.
MAPPING = 10

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


def pays(calls: int, moved: float, cached: float) -> bool:
    """Return whether so many calls of the model pay for memory of ``cached`` bytes that goes back after them.
    ``moved``: bytes that are read and written to dequantize once what is cached."""
    return (calls - 1) * moved >= MAPPING * cached


def rank_variables() -> dict[str, str]:
    """Return the environment that stops ranks from caching dequantized weights, or none."""
    return {} if may_cache_dequantized() else {CACHE_VARIABLE: "0"}
