"""Whether weights may stay dequantized in memory that is spare (quantization/dequantize_once.py)."""

import os

#: 0 in the environment of client and ranks: they may not.
LENDING = "PARALLEL_DIT_LENDING"


def lends() -> bool:
    """May weights take what nothing likely needs?"""
    return os.environ.get(LENDING) != "0"


def lend_no_more():
    """Have ranks that this process starts from now on leave it free: others ran out of memory."""
    os.environ[LENDING] = "0"
