"""The types in which attention's tensors travel (ParallelConfig.wire), and the bytes that they take. Standard
library only."""

FULL, FP8 = "full", "fp8"
#: Bytes of the float32 scale of one token and head.
SCALE_BYTES = 4


def head_bytes(features: int, itemsize: int, wire: str) -> int:
    """Count the bytes of a token's numbers of one head, of ``itemsize`` bytes each where they travel in
    full."""
    return features * itemsize if wire == FULL else features + SCALE_BYTES
