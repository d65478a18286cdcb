"""Whether all ranks run on one GPU, as scripts/doctor.py has them on a machine with one: that shows what they
compute and not how fast."""

import os

#: 1 in the environment of client and ranks.
SHARED_GPU = "PARALLEL_DIT_SHARED_GPU"


def shares_gpu() -> bool:
    """Return whether all ranks run on the first GPU."""
    return os.environ.get(SHARED_GPU) == "1"
