"""How attention's tensors travel (ParallelConfig.wire), and their bytes. Standard library only."""

from collections.abc import Sequence

from ..config import CHOICES

FULL, FP8 = CHOICES["wire"]
#: Bytes of the float32 scale of one token and head.
SCALE_BYTES = 4


def head_bytes(features: int, itemsize: int, wire: str) -> int:
    """Count the bytes of one token and head, of ``itemsize`` for each number where they travel in full."""
    return features * itemsize if wire == FULL else features + SCALE_BYTES


def kv_heads_sent(heads: int, kv_heads: int, ranks: int, shares: Sequence[float] = ()) -> int:
    """Return as how many heads keys and values of ``kv_heads`` go through Ulysses, to ``heads`` of queries:
    the fewest whose groups no two of the ranks share. Each is repeated up to as many. Ranks with ``shares``
    of the heads cut groups, so they get as many as queries have."""
    if ranks == 1:
        return kv_heads
    able = range(kv_heads, heads, kv_heads) if not shares else ()
    return next((count for count in able if not heads % count and not count % ranks), heads)
